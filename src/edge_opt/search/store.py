"""What became of each candidate, in SQLite, and what it depends on."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import NotSaved, OtherSettings, UnreadableProfile, UnreadableStore
from edge_opt.records.sweeps import Candidate, Trial


def plain_trial(trial: Trial) -> dict[str, Any]:
    """A trial as JSON holds it, without its violations: those follow from the constraints of the day."""
    return {name: value for name, value in to_plain(trial).items() if name != "violations"}


def trial_from(plain: dict[str, Any]) -> Trial:
    """The trial that `plain_trial` took apart."""
    return from_plain(Trial, {**plain, "violations": []})


STORE_NAME = "sweep.sqlite"
# 2: what rows depend on beside settings is kept with them.
SCHEMA = 2
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


Scope = Literal["all", "pruned", "int8"]


@dataclass(frozen=True, slots=True)
class ResultSource:
    """Code or data that results depend on: a digest of its content, and whose results they are."""

    digest: str
    scope: Scope = "all"

    def decides(self, candidate: Candidate) -> bool:
        """Whether the result of a candidate depends on it.

        >>> ResultSource("1f", "int8").decides(Candidate(0.5, "fp32", "torch"))
        False
        """
        if self.scope == "pruned":
            return candidate.pruning > 0 or any(share > 0 for _, share in candidate.layer_pruning)
        return self.scope == "all" or candidate.precision == self.scope


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
        """The store of a folder, made if there is none.

        One that was made with other settings is refused, naming them: its rows answer another question. `defaults` are
        the values of settings that an older store does not have. Where `sources` have changed, the rows that depend on
        them are dropped, to be run again. One that is damaged, or of an older schema, is renamed, and a new one is
        begun; so is any if `fresh`. A notice says so. One that is locked is waited for; one that cannot be read or
        written is an error and stays where it is.
        """
        path = folder / STORE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            why = "a fresh start was asked for" if fresh else _unusable(path, on_notice)
            if why is not None:
                on_notice(f"{path} is kept as {_set_aside(path).name}, and a new store is begun: {why}")
        store = cls(_opened(path), path)
        try:
            store._prepare()
            store._hold_to(settings, defaults or {}, folder)
            store._hold_to_sources(sources or {}, on_notice)
        except BaseException:
            store.close()
            raise
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
        return cls(_opened(path), path)

    def close(self) -> None:
        self._connection.close()

    def _ask(self, query: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(query, values)
        except sqlite3.OperationalError as error:
            raise _not_now(self._path, error) from error

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """What is changed inside is on disk afterwards, or else nothing of it is."""
        try:
            with self._connection:
                yield
        except sqlite3.OperationalError as error:
            raise _not_now(self._path, error) from error

    def trials(self) -> dict[str, Trial]:
        """Every finished candidate by its key, in the order in which they finished."""
        rows = self._ask("SELECT key, trial FROM trials ORDER BY position")
        return {key: trial_from(json.loads(text)) for key, text in rows}

    def save(self, trial: Trial) -> None:
        """Keep what became of a candidate."""
        with self._change():
            self._ask(
                "INSERT INTO trials (key, trial) VALUES (?, ?)", (trial.candidate.key, json.dumps(plain_trial(trial)))
            )

    def build_of(self, candidate: Candidate) -> Built | None:
        """What the build of a candidate told, if it was built and not yet measured when the sweep ended."""
        row = self._ask("SELECT built, seconds FROM builds WHERE key = ?", (candidate.key,)).fetchone()
        return None if row is None else Built(json.loads(row[0]), row[1])

    def save_build(self, candidate: Candidate, built: Built) -> None:
        """Keep what the build of a candidate told."""
        with self._change():
            self._ask(
                "INSERT OR REPLACE INTO builds VALUES (?, ?, ?)",
                (candidate.key, json.dumps(built.value), built.seconds),
            )

    def begin(self, candidate: Candidate) -> int:
        """Count an attempt at a candidate before it starts; returns how many there have been."""
        with self._change():
            self._ask(
                "INSERT INTO attempts VALUES (?, ?, 1) ON CONFLICT (key) DO UPDATE SET count = count + 1",
                (candidate.key, json.dumps(to_plain(candidate))),
            )
        return self.attempts(candidate)

    def attempts(self, candidate: Candidate) -> int:
        """How often a candidate was begun."""
        row = self._ask("SELECT count FROM attempts WHERE key = ?", (candidate.key,)).fetchone()
        return 0 if row is None else int(row[0])

    def unfinished(self) -> tuple[Candidate, ...]:
        """Candidates that were begun and have no trial: they run now, or ran when their sweep was ended."""
        rows = self._ask("SELECT candidate FROM attempts WHERE key NOT IN (SELECT key FROM trials) ORDER BY rowid")
        return tuple(from_plain(Candidate, json.loads(text)) for (text,) in rows)

    def forget_failed(self) -> int:
        """Drop the rows of failed candidates, so that they run again; returns how many there were."""
        failed = [key for key, trial in self.trials().items() if trial.status == "failed"]
        with self._change():
            self._forget(failed, ("trials", "builds"))
        return len(failed)

    def _forget(self, keys: Iterable[str], tables: Iterable[str]) -> None:
        for table in tables:
            self._connection.executemany(f"DELETE FROM {table} WHERE key = ?", [(key,) for key in keys])

    def fact(self, name: str) -> Any:
        """Something else that was kept, None where it was not."""
        row = self._ask("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def keep_fact(self, name: str, value: Any) -> None:
        """Keep something that JSON can hold."""
        with self._change():
            self._ask("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def _prepare(self) -> None:
        """Make the tables, all or none: a store that was killed in the making is empty and is made again."""
        if self._ask("PRAGMA user_version").fetchone()[0] == SCHEMA:
            return
        with self._change():
            self._connection.executescript(
                f"BEGIN; {_TABLES} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {SCHEMA}; COMMIT;"
            )

    def _hold_to(self, settings: Mapping[str, Any], defaults: Mapping[str, Any], folder: Path) -> None:
        """Refuse settings that differ from those of the stored rows."""
        wanted = json.loads(json.dumps(settings, default=str))
        kept = self.fact("settings")
        if kept is None:
            self.keep_fact("settings", wanted)
            return
        # A folder of an older version lacks keys that were added since: its rows were made with their defaults.
        missing = {name: value for name, value in defaults.items() if name in wanted and name not in kept}
        kept = {**kept, **json.loads(json.dumps(missing, default=str))}
        if kept != wanted:
            raise OtherSettings(
                f"{folder} holds a sweep with other settings: {'; '.join(_differences(kept, wanted))}. "
                "Choose another folder, go back to those settings, or ask for a fresh start"
            )

    def _hold_to_sources(self, sources: Sources, on_notice: Callable[[str], None]) -> None:
        """Drop the rows that depend on what has changed, after a copy of them all."""
        kept = {name: ResultSource(*plain) for name, plain in (self.fact("sources") or {}).items()}
        changed = [name for name in sorted({*kept, *sources}) if kept.get(name) != sources.get(name)]
        if not changed:
            return
        begun = self._ask("SELECT key, candidate FROM attempts").fetchall()
        candidates = {key: trial.candidate for key, trial in self.trials().items()}
        candidates |= {key: from_plain(Candidate, json.loads(text)) for key, text in begun}
        both = [found for name in changed for found in (kept.get(name), sources.get(name)) if found is not None]
        stale = [key for key, candidate in candidates.items() if any(item.decides(candidate) for item in both)]
        # Rows of a sweep that was not told its sources are its caller's to judge.
        stale = stale if kept else []
        if stale:
            named = ", ".join(changed[:3]) + f" and {len(changed) - 3} more" * (len(changed) > 3)
            on_notice(
                f"{named} changed since: what was found for {len(stale)} of {len(candidates)} candidates depends on "
                f"that and is found anew; the earlier table is kept as {self._copied().name}"
            )
        plain = {name: [source.digest, source.scope] for name, source in sources.items()}
        with self._change():
            self._forget(stale, ("trials", "builds", "attempts"))
            self._ask("INSERT OR REPLACE INTO facts VALUES (?, ?)", ("sources", json.dumps(plain)))

    def _copied(self) -> Path:
        target = _free_name(self._path)
        with contextlib.closing(sqlite3.connect(target)) as copy:
            try:
                self._connection.backup(copy)
            except sqlite3.OperationalError as error:
                raise _not_now(target, error) from error
        return target


def _differences(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*kept, *wanted}):
        if name not in wanted:
            yield f"{name} was {kept[name]!r} and is not set now"
        elif name not in kept:
            yield f"{name} was not set and is {wanted[name]!r} now"
        elif kept[name] != wanted[name]:
            yield f"{name} was {kept[name]!r} and is {wanted[name]!r} now"


# How long a store that another program holds is waited for.
_PATIENCE_S = 30.0


def _connect(path: Path, patience_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=patience_s)
    # The rollback journal, flushed at each step: it needs no shared memory, so it also works on network folders.
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _opened(path: Path) -> sqlite3.Connection:
    try:
        return _connect(path, _PATIENCE_S)
    except sqlite3.OperationalError as error:
        raise _not_now(path, error) from error


def _is_locked(error: sqlite3.Error) -> bool:
    return "locked" in str(error)


def _not_now(path: Path, error: sqlite3.Error) -> UnreadableStore | NotSaved:
    """What to say of a store that cannot be used at the moment, though nothing is wrong with what it holds."""
    if _is_locked(error):
        return UnreadableStore(
            f"{path} is locked by another program; close that and run again to go on: nothing in it was changed"
        )
    if isinstance(error, sqlite3.OperationalError) and ("unable to open" in str(error) or not os.access(path, os.R_OK)):
        return UnreadableStore(
            f"{path} cannot be opened ({error}); see who may read and write there, and run again to go on"
        )
    return NotSaved(
        f"cannot write to {path}: {error}; free some space or allow writing there, and run again to go on: "
        "what was finished is kept"
    )


def _unusable(path: Path, on_notice: Callable[[str], None] = lambda _: None) -> str | None:
    """Why a store must be set aside; None for one that can be used.

    One that is locked or may not be read is neither: it is waited for, or refused. So is a newer one.
    """
    try:
        return _damage(path, patience_s=1.0)
    except sqlite3.OperationalError as error:
        if not _is_locked(error):
            raise _not_now(path, error) from error
    on_notice(f"{path} is locked by another program; waiting for up to {_PATIENCE_S:g} s")
    try:
        return _damage(path, _PATIENCE_S)
    except sqlite3.OperationalError as error:
        raise _not_now(path, error) from error


def _damage(path: Path, patience_s: float) -> str | None:
    """What is wrong with the content of a store; None if nothing is."""
    try:
        with contextlib.closing(_connect(path, patience_s)) as connection:
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
            missing = {"facts", "attempts", "builds", "trials"} - {
                name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            if missing:
                return f"it is damaged: it has no table {min(missing)}"
            store = Store(connection, path)
            store.trials(), store.unfinished(), store.fact("settings")
    except sqlite3.OperationalError:
        # Locked, unreadable, on a disk that fails: that says nothing about what it holds.
        raise
    except (sqlite3.DatabaseError, UnreadableProfile, ValueError, TypeError, KeyError) as error:
        return f"it is damaged: {error}"
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
