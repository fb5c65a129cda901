"""A tab of the dashboard's page without a browser: what is sent to it is serialized and dropped."""

from __future__ import annotations

from typing import Any

from bokeh.core.properties import without_property_validation
from bokeh.document import Document
from bokeh.protocol import Protocol

from heddle_dask.live.scheduler.dashboard._dask_dashboard import add_roots
from heddle_dask.live.scheduler.dashboard.pages import PANELS
from heddle_dask.live.scheduler.dashboard.view import Views
from heddle_dask.views.history.run_snapshot import RunSnapshot


class PageTab:
    """The panels of one tab in a document, which is watched as a session of the Bokeh server watches it."""

    def __init__(self) -> None:
        self.panels = [panel() for panel in PANELS]
        self._views = Views()
        self._doc = Document()
        self._protocol = Protocol()
        self._sent_bytes = 0
        add_roots(self._doc, [panel.root for panel in self.panels])
        self._doc.callbacks.on_change_dispatch_to(self)

    def make_views(self, snapshot: RunSnapshot) -> None:
        """Make the views of all panels."""
        for panel in self.panels:
            self._views.of(type(panel).make, snapshot)

    @without_property_validation
    def show(self, snapshot: RunSnapshot) -> int:
        """Show a snapshot; returns the bytes that a browser would be sent."""
        self._sent_bytes = 0
        for panel in self.panels:
            panel.show(self._views.of(type(panel).make, snapshot), snapshot)
        return self._sent_bytes

    def _document_patched(self, event: Any) -> None:
        """Serialize a change, as for the websocket."""
        message = self._protocol.create("PATCH-DOC", [event])
        self._sent_bytes += len(message.content_json)
        self._sent_bytes += sum(len(buffer.to_bytes()) for buffer in message._buffers)
