"""A server that does what a test tells it by environment; installed in place of an engine's own module.

STAND_IN_SAY: lines it writes first. STAND_IN_EXIT: then it ends with this status. STAND_IN_HANG: the n-th completion never
ends. STAND_IN_DEAF: it never answers /health. STAND_IN_SICK: /health_generate hangs. STAND_IN_MODE: what it says is active.
STAND_IN_CHILD: it leaves a daemon in a session of its own. STAND_IN_STUBBORN: it ignores SIGTERM. STAND_IN_NOISE: it writes
so many bytes. STAND_IN_BARE: it leaves a child
whose environment can not be read, as setproctitle does. STAND_IN_DIE: it ends at the n-th completion. As SGLang it says that
its self-test passed, unless STAND_IN_SAY; STAND_IN_ALGORITHM: what it says was resolved.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SAID = {name[9:].lower(): value for name, value in os.environ.items() if name.startswith("STAND_IN_")}
LOCK = threading.Lock()
COUNT = [0]


def value_of(flag, default):
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health_generate" and "sick" in SAID:
            time.sleep(3600)
        elif self.path in ("/health", "/health_generate"):
            self.answer({}, 503 if "deaf" in SAID else 200)
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": "stand-in"}]})
        elif self.path == "/server_info":
            active = {"mode": SAID.get("mode", value_of("--mode", "ddtree"))}
            if "sglang" in __file__:
                active = {"speculative_algorithm": SAID.get("algorithm", value_of("--speculative-algorithm", None))}
            self.answer({**active, "budget": 24, "env": dict(os.environ), "path": sys.path,
                         "argv": sys.argv, "cwd": os.getcwd(), "file": __file__})  # fmt: skip
        else:
            self.answer({"error": "no such route"}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if "key" in SAID and self.headers.get("Authorization") != "Bearer " + SAID["key"]:
            self.answer({"error": "invalid_api_key"}, 401)
            return
        with LOCK:
            COUNT[0] += 1
            number = COUNT[0]
        if number == int(SAID.get("hang", -1)):
            time.sleep(3600)
        if number == int(SAID.get("die", -1)):
            print(f"the stand-in dies at completion {number}", flush=True)
            os._exit(9)
        if body.get("stream"):
            self.stream(self.path == "/generate")
            return
        self.answer({"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})

    def stream(self, native):
        """Answer `x y z` in three pieces: SGLang's events, or those of the OpenAI routes."""
        self.send_response(200)
        self.end_headers()
        for number, text in enumerate(("x", " y", " z")):
            meta = {"completion_tokens": 2 * number + 1, "spec_verify_ct": number, "finish_reason": {"type": "stop"}}
            event = {"text": "x y z"[: 2 * number + 1], "meta_info": meta} if native else {"choices": [{"text": text}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        usage = {"completion_tokens": 5, "ddtree": {"rounds": 2}}
        last = "" if native else f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        self.wfile.write(f"{last}data: [DONE]\n\n".encode())


def main():
    from ddtree import VERSION

    if VERSION == "bad":
        sys.exit("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory")
    passed = f"DDTREE ready: budgets [{value_of('--speculative-ddtree-budget', '31')}], self-test passed" if "sglang" in __file__ else ""
    for line in SAID.get("say", passed).splitlines():
        print(line, flush=True)
    if "noise" in SAID:
        line = "n" * 99 + "\n"
        for _ in range(int(SAID["noise"]) // 100):
            sys.stdout.write(line)
        sys.stdout.flush()
    if "exit" in SAID:
        sys.exit(int(SAID["exit"]))
    if "child" in SAID:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    if "bare" in SAID:
        subprocess.Popen([os.path.realpath(sys.executable), "-c", "import time; time.sleep(3600)"], env={})
    if "stubborn" in SAID:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer((value_of("--host", "127.0.0.1"), int(value_of("--port", "30000"))), Handler)
    if "stubborn" not in SAID:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print("serving `stand-in` (ddtree)", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
