"""fsspec's ``storage_options`` in obstore's words, so that one set of options opens a store with either client.

Options that obstore has itself pass through. What would be dropped silently is refused, unless it only tunes
fsspec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ckpt.errors import Refused

_TUNING = {
    "asynchronous", "loop", "batch_size", "max_concurrency", "skip_instance_cache", "use_listings_cache",
    "listings_expiry_time", "max_paths", "default_block_size", "default_fill_cache", "default_cache_type",
    "cache_regions", "fixed_upload_size", "use_ssl", "project", "blocksize",
}  # fmt: skip
_S3_NAMES = {
    "key": "access_key_id",
    "username": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "requester_pays": "request_payer",
}
_S3_CLIENT_KWARGS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
}
_CONFIG_TUNING = {"retries", "max_pool_connections", "signature_version", "request_checksum_calculation",
                  "response_checksum_validation", "tcp_keepalive", "user_agent_extra"}  # fmt: skip
_AZURE_NAMES = {"sas_token": "sas_key", "anon": "skip_signature", "endpoint_url": "endpoint"}
_AZURE_CONNECTION = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "BlobEndpoint": "endpoint",
    "SharedAccessSignature": "sas_key",
}


@dataclass(frozen=True, slots=True)
class Native:
    """Arguments of an obstore class; ``endpoint`` is for messages and empty for the service's own address."""

    config: dict[str, Any]
    client: dict[str, Any]
    endpoint: str


def translator(scheme: str) -> Callable[[str, Mapping[str, Any]], Native]:
    """The translation for a scheme: it takes the host part of the URL and the options."""
    if scheme in ("gs", "gcs"):
        return _gcs
    return _s3 if scheme in ("s3", "s3a") else _azure


def _s3(bucket: str, options: Mapping[str, Any]) -> Native:
    left = _without_tuning(options)
    client = dict(left.pop("client_options", {}))
    client_kwargs = dict(left.pop("client_kwargs", {}))
    config_kwargs = dict(left.pop("config_kwargs", {}))
    profile = left.pop("profile", None)
    config = _renamed(client_kwargs, _S3_CLIENT_KWARGS) | _renamed(left, _S3_NAMES) | left
    config["bucket"] = bucket

    match client_kwargs.pop("verify", None):
        case False:
            client["allow_invalid_certificates"] = True
        case str() as path:
            client["root_certificate"] = Path(path).read_text()
    for limit in ("connect_timeout", "read_timeout"):
        if limit in config_kwargs:
            client.setdefault(limit, f"{config_kwargs.pop(limit)}s")
    if dict(config_kwargs.pop("s3", {})).get("addressing_style") == "virtual":
        config["virtual_hosted_style_request"] = True
    _refuse_rest("client_kwargs", client_kwargs)
    _refuse_rest("config_kwargs", {k: v for k, v in config_kwargs.items() if k not in _CONFIG_TUNING})

    endpoint = config.get("endpoint") or next(
        (
            os.environ[name]
            for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
            if name in os.environ
        ),
        "",
    )
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    given = "access_key_id" in config or "aws_access_key_id" in config or config.get("skip_signature")
    if profile or not (given or "credential_provider" in config):
        config |= _from_aws_files(profile, region_known="region" in config)
    return Native(config, client, endpoint)


def _from_aws_files(profile: str | None, *, region_known: bool) -> dict[str, Any]:
    """Credentials and region of a profile in ``~/.aws``, which obstore does not read itself."""
    named = profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    if not profile and "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    files = [
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")),
        Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")),
    ]
    if not named and not any(path.expanduser().is_file() for path in files):
        return {}
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError
    except ImportError:
        if not named:
            return {}
        raise Refused(
            f"the AWS profile {named!r} cannot be read without botocore", hint="pip install 'torchrelay[s3fs]'"
        ) from None
    try:
        session = botocore.session.Session(profile=named)
        credentials = session.get_credentials()
        region = session.get_config_variable("region")
    except BotoCoreError as error:
        raise Refused(f"the AWS profile {named!r} cannot be used: {error}") from None
    if credentials is None:
        return {}

    read = _modified(files)

    def provide() -> dict[str, Any]:
        nonlocal credentials, read
        if (now := _modified(files)) != read:  # keys in a file are renewed by replacing the file
            fresh = botocore.session.Session(profile=named).get_credentials()
            credentials, read = fresh or credentials, now
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # botocore renews what expires; asking it again is cheap.
            "expires_at": datetime.now(UTC) + timedelta(minutes=5),
        }

    return {"credential_provider": provide, **({"region": region} if region and not region_known else {})}


def _modified(files: list[Path]) -> list[tuple[int, int] | None]:
    """Something that changes when any of the files does."""
    seen = [path.expanduser() for path in files]
    return [(s.st_mtime_ns, s.st_ino) if path.is_file() and (s := path.stat()) else None for path in seen]


def _gcs(bucket: str, options: Mapping[str, Any]) -> Native:
    left = _without_tuning(options)
    client = dict(left.pop("client_options", {}))
    token = left.pop("token", None)
    config = _renamed(left, {"endpoint_url": "base_url"}) | left
    config["bucket"] = bucket
    if token == "anon":
        config["skip_signature"] = True
    elif isinstance(token, Mapping):
        config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str) and token not in ("google_default", "cloud"):
        config["service_account"] = token
    endpoint = str(config.get("base_url", ""))
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    return Native(config, client, endpoint)


def _azure(host: str, options: Mapping[str, Any]) -> Native:
    left = _without_tuning(options)
    client = dict(left.pop("client_options", {}))
    pairs = (item.partition("=") for item in str(left.pop("connection_string", "")).split(";"))
    parsed = {_AZURE_CONNECTION[name]: value for name, _, value in pairs if name in _AZURE_CONNECTION}
    config = parsed | _renamed(left, _AZURE_NAMES) | left
    container, _, account_host = host.partition("@")  # abfs://container@account.dfs.core.windows.net
    config["container_name"] = container
    if account_host:
        config.setdefault("account_name", account_host.partition(".")[0])
    endpoint = str(config.get("endpoint", ""))
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    return Native(config, client, endpoint)


def _without_tuning(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and name not in _TUNING}


def _renamed(options: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Take the options called ``names`` out, under their new names."""
    return {new: options.pop(old) for old, new in names.items() if old in options}


def _refuse_rest(where: str, rest: Mapping[str, Any]) -> None:
    if rest:
        raise Refused(
            f"obstore has no counterpart of {where} {', '.join(sorted(rest))}",
            hint='client="fsspec" passes them to s3fs',
        )
