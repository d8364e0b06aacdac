"""File descriptors that are closed once, not inherited by forked children, and not of links."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from typing import Protocol

PORTABLE = "ENQUEUER_PORTABLE"
"""Environment variable: use no memfds, packets and pidfds, as on systems without them."""


def is_portable() -> bool:
    """Return whether to use only what every POSIX system has."""
    return bool(os.environ.get(PORTABLE))


def open_no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of a name that another user can foresee: the `opener` of `open`.

    Raises:
        OSError: It is a link, by which the other user could have any file overwritten; or it
            cannot be opened.
    """
    try:
        # Windows has no such flag.
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            text = "this is a symbolic link, perhaps of another user: remove it"
            raise OSError(errno.ELOOP, text, os.fspath(path)) from None
        raise


class Closable(Protocol):
    """A socket or a descriptor."""

    def close(self) -> None:
        """Close it, unless it is closed already."""


# A forked child that kept one of these open would hide its owner's death from the other end.
_not_for_children: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(thing: Closable) -> None:
    """Close `thing` in every process that is forked from this one."""
    _not_for_children.add(thing)


def owned_sockets(pair: tuple[socket.socket, socket.socket]) -> tuple[socket.socket, socket.socket]:
    """Return two sockets of this process alone, with which it waits for nothing."""
    for end in pair:
        end.setblocking(False)
        close_in_children(end)
    return pair


def _close_inherited() -> None:
    for thing in list(_not_for_children):
        thing.close()
    _not_for_children.clear()


# Windows has none, and no forks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


class Descriptor:
    """A file descriptor that is closed once."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def fileno(self) -> int:
        if self._fd is None:
            raise ValueError("the descriptor is closed")
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
