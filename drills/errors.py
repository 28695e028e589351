"""What can go wrong with a drill itself, as opposed to the target that it tests."""

from __future__ import annotations

from ckpt.errors import CkptError


class HarnessBroken(CkptError):
    """The drill could not do or prove what it set out to do; says nothing about the target."""

    code, exit_status = "D-H", 70


class Usage(CkptError):
    """The drill was asked for in a way that cannot work; nothing was started."""

    code, exit_status = "D-U", 2


class TargetEnded(CkptError):
    """The command ended or hung by itself where no fault was at work, so that nothing could be proven."""

    code, exit_status = "D-T", 3


class NotPossible(CkptError):
    """This machine, this user or this storage does not allow the fault: the drill is not verified, and says why."""

    code, exit_status = "D-N", 3
