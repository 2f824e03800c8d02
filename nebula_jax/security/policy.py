"""The policy of a lab: which streams may cross its switch, and how much of what.

It is policy.json in the federation's folder, which a person writes; without it, every
job of every account may cross. A job is looked up by its name, which its trainers
choose, then as `*`; without either it crosses freely:

    {"jobs": {"m3": {"kinds": ["tokens", "held_out"], "bytes": 5e9,
                     "labs": {"discriminator": ["lab-t"]}},
              "bert": {"kinds": ["delta"], "codecs": {"delta": "private(1, 0.5)"}}}}

`kinds` are the channels whose tensors may cross (all if missing; the frames that steer
a session always may), by their names or the first words of these; `bytes` all that may
cross in the job's life (under `*`, till a thousand other jobs have come), `labs` those
that may be a cluster (any lab if missing), and `codecs` what this lab's own tensors of
a kind must be encoded with first.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from nebula_jax import errors, strict_json

FILE = "policy.json"
STEERING = frozenset(
    ("handshake", "Open", "Hello", "Welcome", "StepDone", "Stop", "Ping", "End")
) | {"Abort"}
"""The kinds of frames that carry nothing of a text or a model."""
_FIELDS = {"kinds", "bytes", "labs", "codecs"}


class PolicyError(errors.NebulaError):
    """A stream, or bytes of one, that the policy does not let cross."""


class Policy:
    """The policy as its file has it."""

    def __init__(self, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the rules of each job, checked."""
        self._jobs = jobs

    def check_kind(self, job: str, kind: str) -> None:
        """Raises PolicyError unless frames of a kind may cross for a job."""
        kinds = self._rules(job).get("kinds")
        if kinds is not None and kind not in STEERING and not _names(kinds, kind):
            allowed = ", ".join(sorted(kinds)) or "nothing"
            raise PolicyError(
                f"{kind} may not cross for job {job}: policy.json allows {allowed}"
            )

    def check_codec(self, job: str, kind: str, codec: str) -> None:
        """Raises PolicyError unless the codec of a channel begins as it must.

        Args:
          kind: the channel's name.
          codec: its codec's, as two clusters compare it.
        """
        for name, first in self._rules(job).get("codecs", {}).items():
            if not _names([name], kind) or f"{codec}|".startswith(f"{first}|"):
                continue
            raise PolicyError(
                f"{kind} may not leave for job {job} as {codec}: policy.json asks for a"
                f" codec that begins with {first}, such as {first}|{codec}"
            )

    def check_bytes(self, job: str, count: int) -> None:
        """Raises PolicyError if more bytes have crossed for a job than may."""
        most = self._rules(job).get("bytes")
        if most is not None and count > most:
            raise PolicyError(
                f"job {job} has used up its {most:,.0f} bytes of policy.json"
            )

    def check_lab(self, job: str, cluster: str, lab: str) -> None:
        """Raises PolicyError unless a lab may be a cluster of a job."""
        labs = self._rules(job).get("labs", {})
        role = cluster.partition(":")[0]
        allowed = labs.get(cluster, labs.get(role))
        if allowed is not None and lab not in allowed:
            raise PolicyError(
                f"{lab} may not be {cluster} of job {job}: policy.json allows"
                f" {', '.join(sorted(allowed)) or 'nobody'}"
            )

    def names_lab(self, job: str, cluster: str = "") -> bool:
        """Returns True if it has the labs of a cluster of a job; of any if empty."""
        labs = self._rules(job).get("labs", {})
        role = cluster.partition(":")[0]
        return bool(labs) if not cluster else cluster in labs or role in labs

    def names_job(self, job: str) -> bool:
        """Returns True if it has rules of a job's own."""
        return job in self._jobs

    def _rules(self, job: str) -> Mapping[str, Any]:
        return self._jobs.get(job, self._jobs.get("*", {}))


def load(path: pathlib.Path) -> Policy:
    """Reads a policy, which without a file allows all; raises PolicyError if bad."""
    try:
        found = strict_json.loads(path.read_bytes())
    except FileNotFoundError:
        return Policy({})
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: cannot be read: {error}") from None
    jobs = found.get("jobs") if isinstance(found, dict) else None
    if not isinstance(jobs, dict) or set(found) != {"jobs"}:
        raise PolicyError(f'{path}: expected {{"jobs": {{NAME: RULES}}}} alone')
    for name, rules in jobs.items():
        _check_rules(rules, f"{path}: job {name}")
    return Policy(jobs)


def _check_rules(rules: Any, where: str) -> None:
    if not isinstance(rules, dict) or not rules.keys() <= _FIELDS:
        raise PolicyError(f"{where}: expected some of {', '.join(sorted(_FIELDS))}")
    most = rules.get("bytes", 0)
    if isinstance(most, bool) or not isinstance(most, int | float) or most < 0:
        raise PolicyError(f"{where}: bytes must be a number from 0")
    if not _is_names(rules.get("kinds", [])):
        raise PolicyError(f"{where}: kinds must be a list of names")
    codecs = rules.get("codecs", {})
    if not isinstance(codecs, dict) or not _is_names(list(codecs.values())):
        raise PolicyError(f"{where}: codecs must be the beginning of one for each kind")
    labs = rules.get("labs", {})
    if not isinstance(labs, dict) or not all(map(_is_names, labs.values())):
        raise PolicyError(f"{where}: labs must be a list of labs for each cluster")


def _names(kinds: Iterable[str], channel: str) -> bool:
    """Returns True if some kind is a channel's name, or its first word."""
    return any(channel == each or channel.startswith(f"{each} ") for each in kinds)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
