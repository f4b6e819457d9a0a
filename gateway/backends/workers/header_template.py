"""An operator's header for a worker, with fields of the request."""

import re
from dataclasses import dataclass
from urllib.parse import quote

from gateway.backends.port import Work
from resilience.failures import invalid_input

# Longest value of a field, characters.
MAX_FIELD_CHARS = 256
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Printable ASCII is sent as it is, except ``%``, which marks encoded characters.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """``value`` has fields of :class:`Work` in braces; the configuration says which are allowed."""

    name: str
    value: str

    def line(self, work: Work) -> bytes:
        """The header line with its CRLF; empty when the request lacks a field.

        ``%`` and characters other than ASCII are percent-encoded as UTF-8. Raises BackendFailure: a field has
        control characters or is too long.
        """
        values: dict[str, str] = {}
        for field in re.findall(r"\{(\w+)\}", self.value):
            value = getattr(work, field)
            if not value:
                return b""
            if len(value) > MAX_FIELD_CHARS or _CONTROL.search(value):
                raise invalid_input(
                    f"{field} cannot be sent in a header; allowed: at most {MAX_FIELD_CHARS} characters, "
                    "none of them a control character",
                    field,
                )
            values[field] = quote(value, safe=_PLAIN)
        return f"{self.name}: {self.value.format_map(values)}\r\n".encode()
