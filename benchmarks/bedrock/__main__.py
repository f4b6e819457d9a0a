"""The Bedrock stand-in as a process: ``python -m benchmarks.bedrock --port 8090 --control-port 8091``.

The behaviour of its calls is posted to the control port as JSON, or given as JSON in the user's turn.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from benchmarks.bedrock.stand_in import ANSWER, Behaviour, StandIn, stand_in

REGIONS = ("us-east-1", "us-west-2")


def main(words: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="A Bedrock of our own.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--control-port", type=int, default=0)
    parser.add_argument("--delay-s", type=float, default=0.0, help="before each piece of the text")
    given = parser.parse_args(words)
    usual = Behaviour(delay_s=given.delay_s)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with stand_in(port=given.port) as bedrock:
        bedrock.model = lambda request: asked_for(request) or usual
        control = HTTPServer(("127.0.0.1", given.control_port), controller(bedrock, usual))
        thread = threading.Thread(target=control.serve_forever)
        thread.start()
        print(json.dumps({"url": bedrock.url, "control_port": control.server_address[1]}), flush=True)
        stop.wait()
        control.shutdown()
        control.server_close()
        thread.join()


def asked_for(request: dict[str, Any]) -> Behaviour | None:
    """Return the behaviour that the user's turn holds as JSON, so that a caller can script its own call."""
    text = request["messages"][-1]["content"][0].get("text", "")
    return Behaviour(**json.loads(text)) if text.startswith("{") else None


def controller(bedrock: StandIn, usual: Behaviour) -> type[BaseHTTPRequestHandler]:
    """Return the control port's handler: GET returns counts, POST sets the behaviour (``{}``: usual)."""

    class Controller(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            with bedrock.lock:
                state = {
                    "calls": len(bedrock.seen),
                    "active": bedrock.active,
                    "connections": bedrock.open_connections,
                    "text": "".join(ANSWER),
                }
            self._answer(200, state)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                behaviour = Behaviour(**{"delay_s": usual.delay_s, **asked})
            except TypeError as error:
                self._answer(400, {"error": str(error)})
                return
            for region in REGIONS:
                bedrock.always[region] = behaviour
            self._answer(200, asked)

        def _answer(self, status: int, body: object) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    return Controller


if __name__ == "__main__":
    main()
