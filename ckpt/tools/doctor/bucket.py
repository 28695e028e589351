"""What an S3 bucket says of itself: encryption, versioning, lifecycle rules, and its clock. Through botocore, if there.

Only questions are sent. obstore has no such calls, and a service or a policy may refuse them: then the answer is
*not verified*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ckpt.tools.doctor.finding import Checked

SKEW_S = 60.0  # S3 refuses signatures of clocks that differ by 15 minutes; ages of marks and grace suffer sooner
QUESTIONS = ("encryption", "versioning", "lifecycle rules", "clock")


def ask(bucket: str, prefix: str, options: Mapping[str, Any]) -> Iterator[Checked]:
    """One answer for each of ``QUESTIONS``."""
    try:
        client = _client(options)
    except ImportError:
        yield from (Checked(q, "not verified", "this needs botocore: pip install 's3fs'") for q in QUESTIONS)
        return
    except Exception as e:
        yield from (Checked(q, "not verified", f"botocore cannot be set up: {type(e).__name__}") for q in QUESTIONS)
        return
    yield _asked("encryption", lambda: _encryption(client.get_bucket_encryption(Bucket=bucket)),
                 {"ServerSideEncryptionConfigurationNotFoundError": "none is set on the bucket"})  # fmt: skip
    yield _asked("versioning", lambda: _versioning(client.get_bucket_versioning(Bucket=bucket)), {})
    rules = {"NoSuchLifecycleConfiguration": "none: parts of uploads that a crash leaves are kept, and paid for"}
    yield _asked("lifecycle rules", lambda: lifecycle(
        client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", []), prefix), rules)  # fmt: skip
    yield _asked("clock", lambda: clock(client.head_bucket(Bucket=bucket)), {})


def _client(options: Mapping[str, Any]) -> Any:
    import botocore.session
    from botocore.config import Config

    kwargs = dict(options.get("client_kwargs", {}))
    session = botocore.session.Session(profile=options.get("profile"))
    names = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token",
             "endpoint_url": "endpoint_url", "region": "region_name", "region_name": "region_name",
             "endpoint": "endpoint_url"}  # fmt: skip
    arguments = {names[k]: v for k, v in options.items() if k in names and v} | kwargs
    arguments.setdefault("region_name", session.get_config_variable("region") or "us-east-1")
    style = {"addressing_style": "path"} if arguments.get("endpoint_url") else {}
    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2}, s3=style)
    if options.get("anon"):
        from botocore import UNSIGNED

        config = config.merge(Config(signature_version=UNSIGNED))
    return session.create_client("s3", config=config, **arguments)


def _asked(name: str, ask: Callable[[], Checked], absent: Mapping[str, str]) -> Checked:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return ask()
    except ClientError as e:
        code = str(e.response.get("Error", {}).get("Code", ""))
        if code in absent:
            return Checked(name, "good", absent[code])
        return Checked(name, "not verified", f"the service does not say: {code or 'no reason'}")
    except BotoCoreError as e:
        return Checked(name, "not verified", f"no answer: {type(e).__name__}")


def _encryption(answer: Mapping[str, Any]) -> Checked:
    rules = answer["ServerSideEncryptionConfiguration"]["Rules"]
    kinds = [r.get("ApplyServerSideEncryptionByDefault", {}).get("SSEAlgorithm", "?") for r in rules]
    return Checked("encryption", "good", f"on by default: {', '.join(kinds) or 'a rule without a kind'}")


def _versioning(answer: Mapping[str, Any]) -> Checked:
    if answer.get("Status") == "Enabled":
        kept = "on: deleted steps are kept as old versions, and paid for, until a lifecycle rule removes them"
        return Checked("versioning", "good", kept)
    return Checked("versioning", "good", "off" if not answer.get("Status") else f"{answer['Status'].lower()}")


def lifecycle(rules: list[Mapping[str, Any]], prefix: str) -> Checked:
    """What the rules do to a run below ``prefix``: one that deletes its objects by age deletes checkpoints."""
    name, deletes, aborts = "lifecycle rules", [], False
    for rule in rules:
        if rule.get("Status") != "Enabled":
            continue
        reach = _prefix(rule)
        if not (reach.startswith(prefix) or prefix.startswith(reach)):
            continue
        if {"Days", "Date"} & rule.get("Expiration", {}).keys():
            deletes.append(
                f"{rule.get('ID', 'a rule without a name')!r} deletes objects below {reach or 'the bucket'!r}"
            )
        aborts |= "AbortIncompleteMultipartUpload" in rule
    if deletes:
        return Checked(name, "bad", "; ".join(deletes) + ": steps would lose objects",
                       "take the run out of the rule; ckpt prune and the keep policy delete steps whole")  # fmt: skip
    left = "uploads that a crash leaves are removed" if aborts else "uploads that a crash leaves are kept, and paid for"
    return Checked(name, "good", f"none deletes objects of the run; {left}")


def _prefix(rule: Mapping[str, Any]) -> str:
    found = rule.get("Filter", {})
    return str(rule.get("Prefix") or found.get("Prefix") or found.get("And", {}).get("Prefix") or "")


def clock(answer: Mapping[str, Any], now: datetime | None = None) -> Checked:
    """This host's clock against the server's, from the date of an answer."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date is None:
        return Checked("clock", "not verified", "the answer carries no date")
    skew_s = ((now or datetime.now(UTC)) - parsedate_to_datetime(date)).total_seconds()
    said = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's" if abs(skew_s) >= 2 else (
        "as the server's, to 2 s")  # fmt: skip
    bad = abs(skew_s) > SKEW_S
    return Checked("clock", "bad" if bad else "good", said, "set this host's clock (chrony, ntp)" if bad else None)
