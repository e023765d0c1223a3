"""Certificates by which the processes of one sweep know each other.

A Dask scheduler runs what any client sends it, so every port of ours asks for a certificate first. All members of a
cluster share one: whoever can read its key belongs to it.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

from edge_opt._support.extras import import_optional
from edge_opt.errors import EdgeOptError, InvalidInput

CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
_LIFE = datetime.timedelta(days=365)
# Clocks of several machines differ.
_SKEW = datetime.timedelta(days=1)


def make_certificates(folder: str | Path) -> Path:
    """Write an authority, a certificate and its key to a folder that only its owner may enter.

    Args:
        folder: Where ca.pem, cert.pem and key.pem go; copy it to every machine that takes part.
    """
    x509 = import_optional("cryptography.x509", "certificates need", "distributed", "cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name(x509, "edge-opt authority")
    above = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        _draft(x509, authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(x509, key_cert_sign=True), critical=True)
        .add_extension(above, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _draft(x509, _name(x509, "edge-opt member"), authority_name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(x509, digital_signature=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(above), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    # The authority's own key is forgotten: nobody can be admitted later.
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    root = Path(folder)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root.chmod(0o700)
    for name, content in (
        (CA, authority.public_bytes(serialization.Encoding.PEM)),
        (CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM)),
        (KEY, secret),
    ):
        _write_private(root / name, content)
    return root


def _name(x509: Any, text: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _draft(x509: Any, subject: Any, issuer: Any, public_key: Any) -> Any:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
    )


def _usage(x509: Any, digital_signature: bool = False, key_cert_sign: bool = False) -> Any:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that was never readable by others, not even for a moment."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)


def security_from(folder: str | Path) -> Any:
    """The certificates of a folder, as Dask takes them."""
    root = Path(folder)
    missing = [name for name in (CA, CERTIFICATE, KEY) if not (root / name).is_file()]
    if missing:
        raise InvalidInput(
            f"{root} has no {missing[0]}; `python -m edge_opt.search.certificates {root}` makes the three files"
        )
    if (root / KEY).stat().st_mode & 0o077:
        raise InvalidInput(f"{root / KEY} can be read by others, who could then run code here; run `chmod 600` on it")
    distributed = import_optional("distributed", "workers need", "distributed", "Dask")
    ca, certificate, key = (str(root / name) for name in (CA, CERTIFICATE, KEY))
    return distributed.Security(
        require_encryption=True,
        tls_ca_file=ca,
        **{f"tls_{role}_cert": certificate for role in ("client", "scheduler", "worker")},
        **{f"tls_{role}_key": key for role in ("client", "scheduler", "worker")},
    )


def main(arguments: list[str]) -> int:
    """Make the certificates of a cluster, and say how to use them: `python -m edge_opt.search.certificates FOLDER`."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m edge_opt.search.certificates FOLDER", file=sys.stderr)
        return 2
    root = Path(arguments[0])
    try:
        if (root / KEY).exists():
            raise InvalidInput(f"{root / KEY} is there already; remove it to make others")
        make_certificates(root)
    except EdgeOptError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{root}: copy it to every machine of the cluster, and nowhere else")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
