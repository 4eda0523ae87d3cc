"""What can go wrong, as data: each class is a message, an exit code and a mend (docs/exit-codes.md is made from them)."""

from __future__ import annotations

from typing import ClassVar


class DeployError(Exception):
    """Stop a command with a message, the exit code of its class, and what to do about it.

    `message` is one lower-case sentence without a full stop; `mend` says what to run or change; `causes` are printed
    indented under the message, outermost first. `exit_code` and `mend` of a subclass are its defaults.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "internal"
    default_mend: ClassVar[str] = "run again with `-vv` and attach the log to a bug report"

    def __init__(self, message: str, *, mend: str | None = None, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend or self.default_mend
        self.causes = causes


class UsageProblem(DeployError):
    """The command line or `ddtree.toml` is wrong, or a confirmation is needed and there is no terminal."""

    exit_code = 2
    kind = "usage"
    default_mend = "see `ddtree-deploy COMMAND --help`"


class HostUnreachable(DeployError):
    """The host does not answer, refuses the login, or went away."""

    exit_code = 10
    kind = "unreachable"
    default_mend = "check the address with `ddtree-deploy hosts` and try `ssh HOST true`"


class HostKeyProblem(DeployError):
    """The host's key is unknown, revoked, or is not the one that is recorded."""

    exit_code = 11
    kind = "host-key"
    default_mend = "compare the fingerprint with the host's own, then use `--accept-new-host-key` for a first contact"


class Locked(DeployError):
    """Another run holds the target's or the store's lock."""

    exit_code = 12
    kind = "locked"
    default_mend = "wait for it with `--lock-wait SECS`, or see `ddtree-deploy lock status TARGET`"


class Incompatible(DeployError):
    """The snapshot can not work on this target: interpreter, ABI, driver, architecture, symbols, or layout."""

    exit_code = 13
    kind = "incompatible"
    default_mend = "see `ddtree-deploy diff TARGET`"


class IntegrityFailure(DeployError):
    """Bytes are not what their digest says, or a manifest is malformed or hostile."""

    exit_code = 14
    kind = "integrity"
    default_mend = "run `ddtree-deploy cache verify` and take the snapshot again"


class NoSpace(DeployError):
    """Too few free bytes or inodes on the target or in the store."""

    exit_code = 15
    kind = "no-space"
    default_mend = "free space there, or drop old generations with `ddtree-deploy generations prune TARGET`"


class TargetBusy(DeployError):
    """Running processes use the files that would be replaced in place."""

    exit_code = 16
    kind = "busy"
    default_mend = "stop the processes first"


class RevertedAfterFailure(DeployError):
    """A proof failed; the generation that was live before is live again, and the host's ledger says so."""

    exit_code = 17
    kind = "reverted"
    default_mend = "the old generation serves; see the failed proof above"


class RestoreUnconfirmed(DeployError):
    """A proof failed and it is not known that the old generation is live again."""

    exit_code = 18
    kind = "restore-unconfirmed"
    default_mend = "look at the host: `ddtree-deploy status TARGET`"


class ServerNotReady(DeployError):
    """The server died or was not ready in time."""

    exit_code = 19
    kind = "not-ready"
    default_mend = "see `ddtree-deploy logs TARGET`"


class SourceDrift(DeployError):
    """The source is not what its metadata says, or changed while it was read."""

    exit_code = 20
    kind = "source-drift"
    default_mend = "stop what writes there and snapshot again, or accept it with `--allow-drift`"


class StalePlan(DeployError):
    """The target changed between the plan and its application."""

    exit_code = 21
    kind = "stale-plan"
    default_mend = "run the command again to plan anew"


class IoProblem(DeployError):
    """The target or the store answered with an I/O error, or is read-only."""

    exit_code = 22
    kind = "io"
    default_mend = "check the disk and the mount options there"


class ProofFailed(DeployError):
    """A proof on the staged or the live tree failed; nothing was switched."""

    exit_code = 17
    kind = "proof-failed"
    default_mend = "the live generation was not touched; see the failed proof above"


class Interrupted(DeployError):
    """The user stopped the run; the journal on the host is consistent."""

    exit_code = 130
    kind = "interrupted"
    default_mend = "run the same command again to go on"


ALL_ERRORS: tuple[type[DeployError], ...] = (
    DeployError,
    UsageProblem,
    HostUnreachable,
    HostKeyProblem,
    Locked,
    Incompatible,
    IntegrityFailure,
    NoSpace,
    TargetBusy,
    RevertedAfterFailure,
    ProofFailed,
    RestoreUnconfirmed,
    ServerNotReady,
    SourceDrift,
    StalePlan,
    IoProblem,
    Interrupted,
)

BY_KIND: dict[str, type[DeployError]] = {cls.kind: cls for cls in ALL_ERRORS}
