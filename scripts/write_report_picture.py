"""Write docs/images/report.png: the first screen of a report, as a browser shows it."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1180, 1000
MOST_BYTES = 200_000


def screenshot(page: Path) -> bytes:
    """The first screen of a page."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("a browser takes the picture: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        subprocess.run(
            [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=8000", f"--user-data-dir={folder}/user",
                f"--screenshot={shot}", page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
        return shot.read_bytes()


def small(picture: bytes) -> bytes:
    """The picture in as many colours as keep it small; text and bars need few."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colors in (256, 128, 64, 32):
        out = io.BytesIO()
        image.quantize(colors, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= MOST_BYTES:
            return out.getvalue()
    raise SystemExit(f"the picture takes more than {MOST_BYTES} bytes")


def main() -> None:
    """Profile a model, write its page, and take the picture."""
    sys.path.insert(0, str(ROOT / "examples"))
    from resnet import resnet50

    import edge_opt as eo

    profile = eo.profile(resnet50(), (1, 3, 224, 224), target=["raspberry-pi-4", "raspberry-pi-5"], name="ResNet-50")
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_bytes(small(screenshot(profile.save(Path(folder) / "report.html"))))
    print(PICTURE, PICTURE.stat().st_size)


if __name__ == "__main__":
    main()
