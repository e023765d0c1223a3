"""The results of candidates in SQLite, and what they depend on."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import NotSaved, OtherSettings, UnreadableProfile, UnreadableStore
from edge_opt.records.sweeps import Candidate, Trial

STORE_NAME = "sweep.sqlite"
# 2: what rows depend on beside settings is kept with them.
SCHEMA = 2
# How long a store that another program holds is waited for.
_PATIENCE_S = 30.0
_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE attempts (key TEXT PRIMARY KEY, candidate TEXT NOT NULL, count INTEGER NOT NULL);
CREATE TABLE builds (key TEXT PRIMARY KEY, built TEXT NOT NULL, seconds REAL NOT NULL);
CREATE TABLE trials (position INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, trial TEXT NOT NULL);
PRAGMA application_id = 0x45444745;  -- "EDGE" in ASCII: how SQLite files say whose they are
"""


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a build, for `measure`, and its duration."""

    value: Mapping[str, Any]
    seconds: float


# "trained": pruned candidates and int8, which may be trained with its rounding.
Scope = Literal["all", "pruned", "int8", "trained"]


@dataclass(frozen=True, slots=True)
class ResultSource:
    """Code or data that results depend on: a digest of its content, and whose results they are."""

    digest: str
    scope: Scope = "all"

    def affects(self, candidate: Candidate) -> bool:
        """Return whether the result of a candidate depends on it.

        >>> ResultSource("1f", "int8").affects(Candidate(0.5, "fp32", "torch"))
        False
        """
        if self.scope in ("pruned", "trained"):
            return candidate.is_pruned or (self.scope == "trained" and candidate.precision == "int8")
        return self.scope in ("all", candidate.precision)


Sources = Mapping[str, ResultSource]


class Store:
    """The trials of one folder. Every change is on disk when its method returns."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    @classmethod
    def open(
        cls,
        folder: Path,
        settings: Mapping[str, Any],
        sources: Sources | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        fresh: bool = False,
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> Store:
        """Open the store of a folder, or make one.

        One that was made with other settings is refused, naming them: its rows answer another question. `defaults` are
        the values of settings that an older store does not have. Where `sources` have changed, the rows that depend on
        them are dropped, to be run again. One that is damaged, or of an older schema, is renamed, and a new one is
        begun; so is any if `fresh`. A notice says so. One that is locked is waited for; one that cannot be read or
        written is an error and stays where it is.
        """
        path = folder / STORE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            why = "a fresh start was asked for" if fresh else _problem(path, on_notice)
            if why is not None:
                on_notice(f"{path} is kept as {_set_aside(path).name}, and a new store is begun: {why}")
        store = cls._opened(path)
        try:
            # All tables or none: a store that was killed in the making is empty and is made again.
            if store._execute("PRAGMA user_version").fetchone()[0] != SCHEMA:
                with store._transaction():
                    store._connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")
            store._check_settings(settings, defaults or {})
            store._drop_outdated(sources or {}, on_notice)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open_readonly(cls, folder: Path) -> Store:
        """Open the store of a folder for reading only."""
        path = folder / STORE_NAME
        if not path.exists():
            raise UnreadableStore(f"{folder} holds no sweep (no {STORE_NAME}); `edge-opt sweep -o {folder}` starts one")
        why = _problem(path)
        if why is not None:
            raise UnreadableStore(f"cannot read {path}: {why}; the next run there keeps it aside and begins anew")
        return cls._opened(path)

    @classmethod
    def _opened(cls, path: Path) -> Store:
        try:
            return cls(_connect(path, _PATIENCE_S), path)
        except sqlite3.OperationalError as error:
            raise _not_now(path, error) from error

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what is changed inside, or nothing of it."""
        try:
            with self._connection:
                yield
        except sqlite3.OperationalError as error:
            raise _not_now(self._path, error) from error

    def _execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        with self._transaction():
            return self._connection.execute(query, values)

    def trials(self) -> dict[str, Trial]:
        """Return every finished candidate by its key, in the order in which they finished."""
        rows = self._execute("SELECT key, trial FROM trials ORDER BY position")
        return {key: from_plain(Trial, {**json.loads(text), "violations": []}) for key, text in rows}

    def save(self, trial: Trial) -> None:
        """Store the result of a candidate."""
        plain = to_plain(trial)
        del plain["violations"]  # they follow from the constraints of the day
        self._execute("INSERT INTO trials (key, trial) VALUES (?, ?)", trial.candidate.key, json.dumps(plain))

    def build_of(self, candidate: Candidate) -> Built | None:
        """Return what the build of a candidate returned, if it was built."""
        row = self._execute("SELECT built, seconds FROM builds WHERE key = ?", candidate.key).fetchone()
        return None if row is None else Built(json.loads(row[0]), row[1])

    def save_build(self, candidate: Candidate, built: Built) -> None:
        """Store what the build of a candidate returned."""
        plain = json.dumps(built.value)
        self._execute("INSERT OR REPLACE INTO builds VALUES (?, ?, ?)", candidate.key, plain, built.seconds)

    def count_attempt(self, candidate: Candidate) -> int:
        """Count an attempt at a candidate before it starts; return how many there have been."""
        self._execute(
            "INSERT INTO attempts VALUES (?, ?, 1) ON CONFLICT (key) DO UPDATE SET count = count + 1",
            candidate.key,
            json.dumps(to_plain(candidate)),
        )
        return self.attempts(candidate)

    def attempts(self, candidate: Candidate) -> int:
        """Return how often a candidate was begun."""
        row = self._execute("SELECT count FROM attempts WHERE key = ?", candidate.key).fetchone()
        return 0 if row is None else int(row[0])

    def unfinished(self) -> tuple[Candidate, ...]:
        """Return candidates that were begun and have no trial: they run now, or ran when their sweep was ended."""
        done = self.trials()
        return tuple(candidate for key, candidate in self._begun().items() if key not in done)

    def _begun(self) -> dict[str, Candidate]:
        rows = self._execute("SELECT key, candidate FROM attempts ORDER BY rowid")
        return {key: from_plain(Candidate, json.loads(text)) for key, text in rows}

    def forget_failed(self) -> int:
        """Drop the rows of failed candidates, so that they run again; return how many there were."""
        failed = [key for key, trial in self.trials().items() if trial.status == "failed"]
        with self._transaction():
            self._forget(failed, ("trials", "builds"))
        return len(failed)

    def _forget(self, keys: Iterable[str], tables: Iterable[str]) -> None:
        for table in tables:
            self._connection.executemany(f"DELETE FROM {table} WHERE key = ?", [(key,) for key in keys])

    def metadata(self, name: str) -> Any:
        """Return something else that was stored under a name, None where nothing was."""
        row = self._execute("SELECT value FROM facts WHERE name = ?", name).fetchone()
        return None if row is None else json.loads(row[0])

    def save_metadata(self, name: str, value: Any) -> None:
        """Store something that JSON can hold."""
        self._execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, json.dumps(value))

    def _check_settings(self, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Refuse settings that differ from those of the stored rows."""
        wanted, defaults = (json.loads(json.dumps(each, default=str)) for each in (settings, defaults))
        stored = self.metadata("settings")
        if stored is None:
            self.save_metadata("settings", wanted)
            return
        # A folder of an older version lacks keys that were added since: its rows were made with their defaults.
        stored = {name: value for name, value in defaults.items() if name in wanted} | stored
        if stored != wanted:
            differences = "; ".join(_differences(stored, wanted))
            problem = f"{self._path.parent} holds a sweep with other settings: {differences}"
            raise OtherSettings(f"{problem}. Choose another folder, go back to those settings, or start fresh")

    def _drop_outdated(self, sources: Sources, on_notice: Callable[[str], None]) -> None:
        """Drop the rows that depend on what has changed, after a copy of them all."""
        stored = {name: ResultSource(*plain) for name, plain in (self.metadata("sources") or {}).items()}
        changed = [name for name in sorted({*stored, *sources}) if stored.get(name) != sources.get(name)]
        if not changed:
            return
        versions = [each[name] for name in changed for each in (stored, sources) if name in each]
        candidates = {key: trial.candidate for key, trial in self.trials().items()} | self._begun()
        stale = [key for key, each in candidates.items() if any(version.affects(each) for version in versions)]
        # Rows of a sweep that was not told its sources are its caller's to judge.
        stale = stale if stored else []
        if stale:
            named = ", ".join(changed[:3]) + f" and {len(changed) - 3} more" * (len(changed) > 3)
            copy = _free_name(self._path)
            try:
                with contextlib.closing(sqlite3.connect(copy)) as connection:
                    self._connection.backup(connection)
            except sqlite3.OperationalError as error:
                raise _not_now(copy, error) from error
            rows = f"what was found for {len(stale)} of {len(candidates)} candidates depends on that and is found anew"
            on_notice(f"{named} changed since: {rows}; the earlier table is kept as {copy.name}")
        plain = {name: [source.digest, source.scope] for name, source in sources.items()}
        with self._transaction():
            self._forget(stale, ("trials", "builds", "attempts"))
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", ("sources", json.dumps(plain)))


def _differences(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*kept, *wanted}):
        if name not in wanted:
            yield f"{name} was {kept[name]!r} and is not set now"
        elif name not in kept:
            yield f"{name} was not set and is {wanted[name]!r} now"
        elif kept[name] != wanted[name]:
            yield f"{name} was {kept[name]!r} and is {wanted[name]!r} now"


def _connect(path: Path, patience_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=patience_s)
    # The rollback journal, flushed at each step: it needs no shared memory, so it also works on network folders.
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _not_now(path: Path, error: sqlite3.Error) -> UnreadableStore | NotSaved:
    """Return what to say of a store that cannot be used at the moment, though nothing is wrong with what it holds."""
    if "locked" in str(error):
        return UnreadableStore(f"{path} is locked by another program; close that and run again to go on")
    if "unable to open" in str(error) or not os.access(path, os.R_OK):
        return UnreadableStore(f"{path} cannot be opened ({error}); allow reading and writing it, and run again")
    return NotSaved(f"cannot write to {path}: {error}; free some space or allow writing there, and run again to go on")


def _problem(path: Path, on_notice: Callable[[str], None] = lambda _: None) -> str | None:
    """Return why a store must be set aside; None for one that can be used.

    One that is locked or may not be read is neither: it is waited for, or refused. So is a newer one.
    """
    patience_s = min(1.0, _PATIENCE_S)
    for is_last in (False, True):
        try:
            with contextlib.closing(_connect(path, patience_s)) as connection:
                return _damage(connection, path)
        except sqlite3.OperationalError as error:
            # Locked, or on a disk that fails: that says nothing about what it holds.
            if is_last or "locked" not in str(error):
                raise _not_now(path, error) from error
        except (sqlite3.DatabaseError, UnreadableProfile, ValueError, TypeError, KeyError) as error:
            return f"it is damaged: {error}"
        on_notice(f"{path} is locked by another program; waiting for up to {_PATIENCE_S:g} s")
        patience_s = _PATIENCE_S
    return None


def _damage(connection: sqlite3.Connection, path: Path) -> str | None:
    """Return what is wrong with the content of a store; None if nothing is."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    schema: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if not tables and not schema:
        return None
    if schema > SCHEMA:
        raise UnreadableStore(f"{path} has schema {schema} of a newer edge_opt, and this reads {SCHEMA}; upgrade it")
    missing = {"facts", "attempts", "builds", "trials"} - tables
    if missing:
        return f"it is damaged: it has no table {min(missing)}"
    if schema < SCHEMA:
        return f"it is of schema {schema}, and this edge_opt reads {SCHEMA}"
    quick_check: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if quick_check != "ok":
        return f"it is damaged: {quick_check}"
    store = Store(connection, path)
    store.unfinished(), store.metadata("settings")
    return None


def _set_aside(path: Path) -> Path:
    """Rename a store, with its journal if there is one, to a name that says when."""
    target = _free_name(path)
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists():
        journal.rename(target.with_name(f"{target.name}-journal"))
    return path.rename(target)


def _free_name(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S")
    number = 0
    while (target := path.with_name(f"{path.stem}.{stamp}{f'-{number}' * bool(number)}{path.suffix}")).exists():
        number += 1
    return target
