"""What others wrote: files that may be anything, and texts that may hold anything."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

#: No file that a report looks at comes near this.
LIMIT_BYTES = 16 << 20
#: What of one text is shown.
LIMIT_CHARACTERS = 4000
_URL_USER = re.compile(r"(?<=://)[^\s/?#@'\"<>]*(?:@[^\s/?#@'\"<>]*)*(?=@)")
_QUERY = re.compile(
    r"(?i)(?<=[?&;])([\w.-]{0,64}(?:token|secret|password|passwd|api-?_?key|signature|credential)[\w.-]{0,64}=)[^\s&;#'\"<>]+"
)


def read(path: Path) -> bytes:
    """The content of a regular file. Raises OSError, without waiting, for a pipe, a device, or more than LIMIT_BYTES."""
    for _ in range(3):
        try:
            return _read(path)
        except OSError as error:
            if error.errno != errno.ESTALE:  # on NFS: replaced by another host while it was open here
                raise
    return _read(path)


def _read(path: Path) -> bytes:
    # Before it is opened as well: to open some devices is to use them.
    _check(path.stat(), path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check(os.fstat(file.fileno()), path)
        content = file.read(LIMIT_BYTES + 1)
    if len(content) > LIMIT_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def _check(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if found.st_size > LIMIT_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))


def shown(text: object) -> str:
    """A text as one line for a terminal or a log: what is not printable is escaped, and credentials are left out."""
    plain = without_credentials(str(text))
    if len(plain) > LIMIT_CHARACTERS:
        plain = f"{plain[:LIMIT_CHARACTERS]}... ({len(plain)} characters)"
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in plain)


def without_credentials(text: str) -> str:
    """Each URL without its user, its password and what its query calls a token, a key or the like."""
    return _QUERY.sub(r"\1***", _URL_USER.sub("***", text))
