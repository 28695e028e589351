"""The outcome of a validation as JUnit XML: a suite for each checkpoint, a case for its records and for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from ckpt.tools.report import Finding, Report
from ckpt.tools.survey import Survey

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed even when escaped


def junit_xml(outcome: Survey) -> str:
    """The document. A case fails where something of it is damaged, and is skipped where that is not known."""
    suites = ET.Element("testsuites", name=f"ckpt validate {_clean(outcome.where)}")
    totals = {"tests": 0, "failures": 0, "skipped": 0}
    for report in outcome.reports:
        cases = list(_cases(report))
        counts = {"tests": len(cases), "failures": sum(c.find("failure") is not None for c in cases),
                  "skipped": sum(c.find("skipped") is not None for c in cases)}  # fmt: skip
        suite = ET.SubElement(suites, "testsuite", name=_name(report), errors="0", time=f"{report.seconds:.3f}")
        suite.attrib.update({k: str(v) for k, v in counts.items()})
        suite.extend(cases)
        totals = {k: v + counts[k] for k, v in totals.items()}
    suites.attrib.update({"errors": "0", **{k: str(v) for k, v in totals.items()}})
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _name(report: Report) -> str:
    return _clean(f"step {report.step} ({report.attempt})" if report.attempt else report.where)


def _cases(report: Report) -> Iterator[ET.Element]:
    groups: dict[str, list[Finding]] = {"records": []}
    groups |= {f"objects of rank {r}": [] for r in report.ranks}
    for f in report.findings:
        of_rank = f.rank is not None and f.object.startswith(("__", "index/"))
        groups.setdefault(f"objects of rank {f.rank}" if of_rank else "records", []).append(f)
    for n, (group, findings) in enumerate(groups.items()):
        case = ET.Element("testcase", classname=f"ckpt.validate.{report.level}", name=f"{_name(report)}: {group}",
                           time=f"{report.seconds if n == 0 else 0:.3f}")  # fmt: skip
        if findings:
            failure = ET.SubElement(case, "failure", type="Damaged", message=_clean(findings[0].what))
            failure.text = _clean("\n".join(map(_line, findings)))
        elif report.verdict == "not verified":
            ET.SubElement(case, "skipped", message=_clean(report.reason or "not verified"))
        yield case


def _line(f: Finding) -> str:
    where = f", bytes {f.span[0]}-{f.span[1]}" if f.span else ""
    item = f" ({f.item}{'' if f.block is None else f', block {f.block}'})" if f.item else ""
    wanted = f"; expected {f.expected}, found {f.found}" if f.expected or f.found else ""
    return f"{f.object}{item}{where}: {f.what}{wanted}"


def _clean(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)
