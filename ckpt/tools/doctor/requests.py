"""How many requests a save sends, and what it is allowed to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PART_BYTES = 16 << 20  # of an upload in parts, which obstore writes
RECORDS = 2  # manifest and commit record; data, indexes and .metadata are objects of the step
LISTS = 5  # of the epochs: before the plan, before and after the commit; of the attempt: before and after its data


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests of one save. ``writes`` are PUT, and POST of uploads in parts; retention and retries come on top."""

    ranks: int
    objects: int
    writes: int
    lists: int

    @property
    def formula(self) -> str:
        """How the numbers come about."""
        return (
            f"writes: for each object 1, or 2 and 1 for each {PART_BYTES >> 20} MiB of a larger one; 1 index a rank; "
            f".metadata, manifest, commit record. lists: {LISTS}"
        )


def of_save(ranks: int, sizes: Iterable[int]) -> Requests:
    """Requests of a save whose objects (data, indexes, ``.metadata``) have these sizes in bytes."""
    counts = [1 if size <= PART_BYTES else 2 + -(-size // PART_BYTES) for size in sizes]
    return Requests(ranks=ranks, objects=len(counts), writes=sum(counts) + RECORDS, lists=LISTS)


def permissions(scheme: str, place: str) -> tuple[str, ...]:
    """The smallest set with which a run works at ``bucket/prefix`` or a folder; the first line is enough to read."""
    bucket, _, prefix = place.partition("/")
    below = f"{prefix}/*" if prefix else "*"
    if scheme in ("s3", "s3a"):
        objects = f"arn:aws:s3:::{bucket}/{below}"
        return (
            f"to read: s3:ListBucket on arn:aws:s3:::{bucket} (s3:prefix {below}); s3:GetObject on {objects}",
            f"to write besides: s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload on {objects}",
        )
    if scheme in ("gs", "gcs"):
        return (
            f"to read: storage.objects.list, storage.objects.get on {bucket}/{below}",
            "to write besides: storage.objects.create, storage.objects.delete, storage.multipartUploads.create, "
            "storage.multipartUploads.abort",
        )
    if scheme in ("az", "azure", "abfs", "abfss"):
        blobs = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
        return (
            f"to read: {blobs}/read on {place}",
            f"to write besides: {blobs}/write, {blobs}/add/action, {blobs}/delete",
        )
    if scheme == "file":
        return (f"to read: r-x on {place} and all below", f"to write besides: -w- on {place} and all below")
    return (f"to read: list and get at {scheme}://{place}", "to write besides: put and delete")
