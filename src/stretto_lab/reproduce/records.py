"""All records, and the papers that they are of."""

from collections.abc import Mapping
from types import MappingProxyType

from stretto_lab.reproduce.acco import ACCO, ACCO_RECORDS
from stretto_lab.reproduce.echo import ECHO, ECHO_RECORDS
from stretto_lab.reproduce.paft import PAFT, PAFT_RECORDS
from stretto_lab.reproduce.questions import QUESTIONS
from stretto_lab.reproduce.record import Paper, Record

PAPERS: Mapping[str, Paper] = MappingProxyType({paper.key: paper for paper in (ACCO, PAFT, ECHO)})
"""By key."""
RECORDS: Mapping[str, Record] = MappingProxyType(
    {record.id: record for record in (*ACCO_RECORDS, *PAFT_RECORDS, *ECHO_RECORDS, *QUESTIONS)}
)
"""By id."""
