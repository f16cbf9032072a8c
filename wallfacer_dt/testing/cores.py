"""Where the core file of a process that crashed is; on Linux."""

import re
from pathlib import Path

_KERNEL = Path("/proc/sys/kernel")


def core_of(pid: int, folder: Path) -> str:
    """Where the core file of a process is that ended of a signal in a folder, or why there is none; empty if unknown.

    A file that the next one would take the place of is renamed: the process' number is appended.
    """
    try:
        pattern = (_KERNEL / "core_pattern").read_text().strip()
        is_numbered = "%p" in pattern or (_KERNEL / "core_uses_pid").read_text().strip() != "0"
    except OSError:
        return ""
    if pattern.startswith("|"):
        return f"its core file was given to {pattern}"
    import resource  # which there is on Unix, as /proc

    if resource.getrlimit(resource.RLIMIT_CORE)[0] == 0:
        return "there is no core file, since `ulimit -c` is 0"
    names = re.sub("%(.)", lambda found: str(pid) if found[1] == "p" else "*", str(folder / pattern))
    if is_numbered and "%p" not in pattern:
        names += f".{pid}"
    found = sorted(Path("/").glob(names.removeprefix("/")), key=lambda path: path.stat().st_mtime)
    if not found:
        return f"no core file was found at {names}"
    core = found[-1]
    return f"its core file is {core if is_numbered else core.rename(f'{core}.{pid}')}"
