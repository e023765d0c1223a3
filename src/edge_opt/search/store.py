"""What became of each candidate, in SQLite; one sweep per folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import FolderInUse, OtherSettings, UnreadableStore
from edge_opt.records import Candidate, Trial


def plain_trial(trial: Trial) -> dict[str, Any]:
    """A trial as JSON holds it, without its violations: those follow from the constraints of the day."""
    return {name: value for name, value in to_plain(trial).items() if name != "violations"}


def trial_from(plain: dict[str, Any]) -> Trial:
    """The trial that `plain_trial` took apart."""
    return from_plain(Trial, {**plain, "violations": []})


LOCK_NAME = "sweep.lock"
# `owner` holds the lock for an instant when it looks; a run that starts just then tries again.
_TRIES = 5
_PAUSE_S = 0.1


class Owner(NamedTuple):
    """The process that sweeps in a folder."""

    pid: int
    host: str


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """The folder is ours until the end; one that another process sweeps in is refused with its process id.

    The kernel drops the lock when its process ends, in whatever way, so a killed sweep is no obstacle.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+", encoding="utf-8") as file:
        for attempt in range(_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 < _TRIES:
                    time.sleep(_PAUSE_S)
                    continue
                found = _read_owner(folder)
                who = f"process {found.pid} on {found.host}" if found else "another process"
                raise FolderInUse(
                    f"{folder} is in use: {who} sweeps there; wait for it, end it, or choose another folder"
                ) from None
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def owner(folder: Path) -> Owner | None:
    """The process that sweeps in a folder now; None when nobody does."""
    import fcntl

    try:
        with (folder / LOCK_NAME).open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _read_owner(folder)
    return None


def _read_owner(folder: Path) -> Owner | None:
    try:
        return Owner(**json.loads((folder / LOCK_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """This machine is busy with a build; nothing is timed on it meanwhile. Builds go side by side."""
    import fcntl

    with _machine_file("gate") as gate, _machine_file("work") as work:
        # Whoever waits to time something holds the gate, so that builds cannot keep it out for ever.
        fcntl.flock(gate, fcntl.LOCK_SH)
        fcntl.flock(work, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def alone(on_wait: Callable[[], None]) -> Iterator[None]:
    """This machine is ours for timing: no build of any sweep of this user runs, and none starts."""
    import fcntl

    with _machine_file("gate") as gate, _machine_file("work") as work:
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(work, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(work, fcntl.LOCK_EX)
        yield


def _machine_file(name: str) -> TextIO:
    return (Path(tempfile.gettempdir()) / f"edge-opt-{os.getuid()}-{name}.lock").open("a", encoding="utf-8")


STORE_NAME = "sweep.sqlite"
SCHEMA = 1
# "EDGE" in ASCII: how SQLite files say whose they are.
_APPLICATION = 0x45444745
_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE attempts (key TEXT PRIMARY KEY, candidate TEXT NOT NULL, count INTEGER NOT NULL);
CREATE TABLE builds (key TEXT PRIMARY KEY, built TEXT NOT NULL, seconds REAL NOT NULL);
CREATE TABLE trials (position INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, trial TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Built:
    """What a build told, for `measure`, and how long it took."""

    value: Mapping[str, Any]
    seconds: float


class Store:
    """The trials of one folder. Every change is on disk when its method returns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(
        cls,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        fresh: bool = False,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> Store:
        """The store of a folder, made if there is none.

        One that was made with other settings is refused, naming them: its rows answer another question. One that is
        damaged, or of an older schema, is renamed, and a new one is begun; so is any if `fresh`. Each is said.
        """
        path = folder / STORE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            why = "a fresh start was asked for" if fresh else _unusable(path)
            if why is not None:
                on_notice(f"{path} is kept as {_set_aside(path).name}, and a new store is begun: {why}")
        store = cls(_connect(path))
        store._prepare()
        store._hold_to(settings, folder)
        return store

    @classmethod
    def look(cls, folder: Path) -> Store:
        """The store of a folder, for reading only."""
        path = folder / STORE_NAME
        if not path.exists():
            raise UnreadableStore(f"{folder} holds no sweep: there is no {STORE_NAME} in it")
        why = _unusable(path)
        if why is not None:
            raise UnreadableStore(f"cannot read {path}: {why}; the next run there keeps it aside and begins anew")
        return cls(_connect(path))

    def close(self) -> None:
        self._connection.close()

    def trials(self) -> dict[str, Trial]:
        """Every finished candidate by its key, in the order in which they finished."""
        rows = self._connection.execute("SELECT key, trial FROM trials ORDER BY position")
        return {key: trial_from(json.loads(text)) for key, text in rows}

    def save(self, trial: Trial) -> None:
        """Keep what became of a candidate."""
        with self._connection:
            self._connection.execute(
                "INSERT INTO trials (key, trial) VALUES (?, ?)", (trial.candidate.key, json.dumps(plain_trial(trial)))
            )

    def build_of(self, candidate: Candidate) -> Built | None:
        """What the build of a candidate told, if it was built and not yet measured when the sweep ended."""
        row = self._connection.execute("SELECT built, seconds FROM builds WHERE key = ?", (candidate.key,)).fetchone()
        return None if row is None else Built(json.loads(row[0]), row[1])

    def save_build(self, candidate: Candidate, built: Built) -> None:
        """Keep what the build of a candidate told."""
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO builds VALUES (?, ?, ?)",
                (candidate.key, json.dumps(built.value), built.seconds),
            )

    def begin(self, candidate: Candidate) -> int:
        """Count an attempt at a candidate before it starts; returns how many there have been."""
        with self._connection:
            self._connection.execute(
                "INSERT INTO attempts VALUES (?, ?, 1) ON CONFLICT (key) DO UPDATE SET count = count + 1",
                (candidate.key, json.dumps(to_plain(candidate))),
            )
        return self.attempts(candidate)

    def attempts(self, candidate: Candidate) -> int:
        """How often a candidate was begun."""
        row = self._connection.execute("SELECT count FROM attempts WHERE key = ?", (candidate.key,)).fetchone()
        return 0 if row is None else int(row[0])

    def unfinished(self) -> tuple[Candidate, ...]:
        """Candidates that were begun and have no trial: they run now, or ran when their sweep was ended."""
        rows = self._connection.execute(
            "SELECT candidate FROM attempts WHERE key NOT IN (SELECT key FROM trials) ORDER BY rowid"
        )
        return tuple(from_plain(Candidate, json.loads(text)) for (text,) in rows)

    def forget_failed(self) -> int:
        """Drop the rows of failed candidates, so that they run again; returns how many there were."""
        failed = [key for key, trial in self.trials().items() if trial.status == "failed"]
        with self._connection:
            for table in ("trials", "builds"):
                self._connection.executemany(f"DELETE FROM {table} WHERE key = ?", [(key,) for key in failed])
        return len(failed)

    def fact(self, name: str) -> Any:
        """Something else that was kept, None where it was not."""
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def keep_fact(self, name: str, value: Any) -> None:
        """Keep something that JSON can hold."""
        with self._connection:
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def _prepare(self) -> None:
        """Make the tables, all or none: a store that was killed in the making is empty and is made again."""
        if self._connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA:
            return
        self._connection.executescript(
            f"BEGIN; {_TABLES} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {SCHEMA}; COMMIT;"
        )

    def _hold_to(self, settings: Mapping[str, Any], folder: Path) -> None:
        wanted = json.loads(json.dumps(settings, default=str))
        kept = self.fact("settings")
        if kept is None:
            self.keep_fact("settings", wanted)
        elif kept != wanted:
            self.close()
            raise OtherSettings(
                f"{folder} holds a sweep with other settings: {'; '.join(_differences(kept, wanted))}. "
                "Choose another folder, go back to those settings, or ask for a fresh start"
            )


def _differences(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*kept, *wanted}):
        if name not in wanted:
            yield f"{name} was {kept[name]!r} and is not set now"
        elif name not in kept:
            yield f"{name} was not set and is {wanted[name]!r} now"
        elif kept[name] != wanted[name]:
            yield f"{name} was {kept[name]!r} and is {wanted[name]!r} now"


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30)
    # The rollback journal, flushed at each step: it needs no shared memory, so it also works on network folders.
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _unusable(path: Path) -> str | None:
    """Why a store cannot be used; None for one that can. A newer one is refused, for it is not ours to put aside."""
    try:
        with contextlib.closing(_connect(path)) as connection:
            application, schema = (
                cast(int, connection.execute(f"PRAGMA {name}").fetchone()[0])
                for name in ("application_id", "user_version")
            )
            if schema > SCHEMA and application == _APPLICATION:
                raise UnreadableStore(
                    f"{path} was written by a newer edge_opt (schema {schema}, this one reads {SCHEMA}); "
                    "upgrade, or choose another folder"
                )
            if (application, schema) == (0, 0) and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                return None
            if application != _APPLICATION:
                return "it is damaged: not a store of sweeps"
            if schema < SCHEMA:
                return f"it is of schema {schema}, and this edge_opt reads {SCHEMA}"
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                return f"it is damaged: {found}"
            store = Store(connection)
            store.trials(), store.unfinished(), store.fact("settings")
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError) as error:
        return f"it is damaged: {error}"
    return None


def _set_aside(path: Path) -> Path:
    """Rename a store, with its journal if there is one, to a name that says when."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    number = 0
    while (target := path.with_name(f"{path.stem}.{stamp}{f'-{number}' * bool(number)}{path.suffix}")).exists():
        number += 1
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists():
        journal.rename(target.with_name(f"{target.name}-journal"))
    return path.rename(target)
