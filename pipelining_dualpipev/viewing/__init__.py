"""Pictures of a step, planned or measured: SVG and HTML, text for terminals, and traces for Chrome and Perfetto."""

from pipelining_dualpipev.viewing.svg import to_html, to_svg
from pipelining_dualpipev.viewing.text import to_text
from pipelining_dualpipev.viewing.trace import to_trace

__all__ = ["to_html", "to_svg", "to_text", "to_trace"]
