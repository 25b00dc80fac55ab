"""Beside another user of the machine: what they put, or change, where files are kept is never used.

The process is the victim, root, and forks of it are the other user; each setting ends with a loop whose planted machine
code would answer ``PLANTED``.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from step_views.sweep.files import Journal, SweepError
from tracer import kept_files
from tracer.cores import RUN_MODULE
from tracer.errors import ForetraceError
from tracer.kept_files import KEY, read_kept, scratch_folder, why_unkept, write_kept
from tracer.lazy import llvm
from tracer.machine_code import ENTRY, KeptLoop, _surroundings

pytestmark = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="acts as two users, so needs root")
OTHER = 40_123
"""A user whom no system has: past people, before containers."""
HONEST, PLANTED = 42, 666
ROOT = Path(__file__).resolve().parents[2]


def _answer(value: int) -> int:
    return value


class _Loop(KeptLoop):
    """A loop that answers ``HONEST``, without numba."""

    def __init__(self) -> None:
        super().__init__(_answer, ["int64"])

    @property
    def file(self) -> str:
        return f"{__name__}.{self.__name__}-{self._key_of(*_surroundings())}.o"

    def _compiled(self) -> bytes:
        return _code(HONEST)


def _code(answer: int) -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="default", codemodel="jitdefault", jit=True)
    return bytes(machine.emit_object(llvm.parse_assembly(
        f"define i64 @{ENTRY}(i64 %sizes, i64 %value) {{\n  ret i64 {answer}\n}}")))


def _signed(code: bytes, key: bytes, name: str) -> bytes:
    return hmac.digest(key, name.encode() + b"\0" + code, hashlib.sha256) + code


def _plant(folder: Path, name: str | None = None, code: bytes | None = None) -> None:
    """Put code into a folder, with a key of one's own that it is signed with."""
    name = _Loop().file if name is None else name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in ((KEY, b"k" * 32), (name, _signed(code or _code(PLANTED), b"k" * 32, name))):
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_bytes(content)
        (folder / file).chmod(0o600)


def _as_other(act: Callable[[], object]) -> bool:
    """Let the other user act; returns whether the system let them."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            os.umask(0o022)
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that all can enter, below it ``home`` and ``cache`` of this user's, and a sticky ``open`` for all."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    for name, mode in (("home", 0o755), ("cache", 0o755), ("open", 0o1777)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    for variable in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("TMPDIR", str(folder / "open"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    kept_files._tidy.cache_clear()
    yield folder
    shutil.rmtree(folder)


def _others(base: Path) -> Path:
    """A folder that the other user has made, as they can in a sticky one, and opened to all."""
    folder = base / "open" / "theirs"
    assert _as_other(lambda: (folder.mkdir(), folder.chmod(0o777)))
    return folder


def _own_place(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place in use, whose code is still to be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    assert write_kept("first", b"")
    return base / "cache" / "foretrace"


def _umask(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        assert _Loop()(0) == HONEST
    finally:
        os.umask(before)
    places = [folder for folder in base.rglob("*") if folder.is_dir() and folder.name != "open"]
    assert all(not path.stat().st_mode & 0o022 for path in (*places, *base.rglob("*.o")))
    for place in places:
        assert not _as_other(lambda place=place: _plant(place))  # type: ignore[misc]


def _planted(variable: str, folder: str, place: str, mode: int, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable names a folder of the other user, or one in which all can make some, and they plant code there."""
    if folder == "open/theirs":
        theirs = _others(base)
        assert _as_other(lambda: theirs.chmod(mode))
    monkeypatch.setenv(variable, str(base / folder))
    assert _as_other(lambda: _plant(base / folder / place))


_xdg = partial(_planted, "XDG_CACHE_HOME", "open/theirs", "foretrace", 0o777)


def _tmpdir(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = _others(base)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("TMPDIR", str(theirs))
    mine = theirs / "foretrace-0"
    mine.mkdir(mode=0o700)  # an earlier run's, which the other user moves away
    assert _as_other(lambda: (mine.rename(theirs / "moved"), _plant(mine)))


def _group(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = _own_place(base, monkeypatch)
    os.chown(place, 0, OTHER)
    place.chmod(0o770)
    assert _as_other(lambda: _plant(place))


def _linked_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = _others(base)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "open"))
    assert _as_other(lambda: (_plant(theirs), (base / "open" / "foretrace").symlink_to(theirs)))


def _race(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is found good, then another lies there."""
    place = _own_place(base, monkeypatch)
    check = kept_files.check_own

    def checked(found: os.stat_result, name: str, *others: int, **way: bool) -> None:
        check(found, name, *others, **way)
        if name == str(place) and not (base / "cache" / "was").exists():
            place.rename(base / "cache" / "was")
            _plant(place)

    monkeypatch.setattr(kept_files, "check_own", checked)


def _linked_file(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name = _own_place(base, monkeypatch), _Loop().file
    elsewhere = base / "home" / "elsewhere"
    elsewhere.write_bytes(_signed(_code(PLANTED), (place / KEY).read_bytes(), name))
    elsewhere.chmod(0o600)
    (place / name).symlink_to(elsewhere)


def _hard_link(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name = _own_place(base, monkeypatch), _Loop().file
    _linked_file(base, monkeypatch)
    (place / name).unlink()
    os.link(base / "home" / "elsewhere", place / name)


def _known_key(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name = _own_place(base, monkeypatch), _Loop().file
    (place / KEY).chmod(0o644)
    (place / name).write_bytes(_signed(_code(PLANTED), (place / KEY).read_bytes(), name))
    (place / name).chmod(0o600)


SETTINGS: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "umask": _umask, "XDG": _xdg, "numba": partial(_planted, "NUMBA_CACHE_DIR", "open/theirs", "", 0o777),
    "sticky": partial(_planted, "XDG_CACHE_HOME", "open/theirs", "foretrace", 0o1777),
    "home": partial(_planted, "HOME", "open", ".cache/foretrace", 0), "TMPDIR": _tmpdir, "group": _group,
    "linked folder": _linked_folder, "linked file": _linked_file, "hard link": _hard_link, "race": _race,
    "known key": _known_key}


@pytest.mark.parametrize("setting", SETTINGS)
def test_planted_code_never_runs_and_the_loop_still_answers(
        setting: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SETTINGS[setting](base, monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert [_Loop()(0), _Loop()(0)] == [HONEST, HONEST]


def test_code_of_ones_own_place_is_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else none of the above would tell anything."""
    place = _own_place(base, monkeypatch)
    assert write_kept(_Loop().file, _code(PLANTED))
    assert _Loop()(0) == PLANTED
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 and stat.S_IMODE((place / KEY).stat().st_mode) == 0o600
    (place / "another").write_bytes((place / _Loop().file).read_bytes())  # signed, under its own name alone
    assert read_kept("another") is None


def test_a_refused_place_is_not_mended_and_says_why(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _group(base, monkeypatch)
    (base / "open" / "foretrace-0").symlink_to(base / "cache")
    assert not write_kept("name", b"content")
    assert stat.S_IMODE((base / "cache" / "foretrace").stat().st_mode) == 0o770
    cache, temporary = why_unkept().items()
    assert cache[1].endswith("foretrace is open to other users") and temporary[1]


@pytest.mark.parametrize("spoil", [lambda file: file.parent.chmod(0o777), lambda file: os.chown(file, OTHER, OTHER)])
def test_bitcode_that_others_can_change_is_not_taken(base: Path, spoil: Callable[[Path], None]) -> None:
    module = base / "home" / "module.py"
    shipped = base / "home" / "shipped" / "loop.bc.z"
    shipped.parent.mkdir()
    for file in (module, shipped):
        file.touch()
    assert kept_files.read_shipped(shipped, module) == b""
    spoil(shipped)
    with pytest.raises(kept_files.Unsafe):
        kept_files.read_shipped(shipped, module)


def test_temporary_files_lie_where_nobody_can_swap_them(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch_folder() as folder:
        assert Path(folder).parent == base / "open"
    monkeypatch.setenv("TMPDIR", str(_others(base)))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch_folder() as folder:
        assert Path(folder).parent == base / "home" / ".cache" / "foretrace"
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(ForetraceError, match="TMPDIR"):
        scratch_folder()


def test_a_journal_of_another_user_is_not_gone_on_with(base: Path) -> None:
    table = base / "open" / "table.csv"
    assert _as_other(Path(f"{table}.journal").touch)
    with pytest.raises(SweepError, match="belongs to another user"):
        Journal(table, {})


def test_modules_of_the_current_directory_are_not_run(base: Path) -> None:
    for name in ("foretrace", "typer"):
        assert _as_other(lambda name=name: (base / "open" / f"{name}.py").write_text("raise SystemExit(3)"))  # type: ignore[misc]
    ran = subprocess.run([*RUN_MODULE, "foretrace", "--version"], cwd=base / "open", check=False,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0
