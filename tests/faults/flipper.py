"""Stand in a pipe and flip one bit: `python flipper.py OFFSET|hex:PATTERN ONCE_FILE < in > out` (stdlib only).

With an offset, the byte at that place of the stream; with a pattern, the byte after its first occurrence. When ONCE_FILE is
given and exists, nothing is flipped; else it is made at the flip, so that a retry on a new stream goes through.
"""

import os
import sys


def main() -> None:
    where, once = sys.argv[1], sys.argv[2]
    pattern = bytes.fromhex(where[4:]) if where.startswith("hex:") else b""
    offset = -1 if pattern else int(where)
    armed = not (once and os.path.exists(once))
    seen, carry = 0, b""
    while True:
        data = os.read(0, 65536)
        if not data:
            break
        if armed:
            at = offset - seen
            if pattern:
                found = (carry + data).find(pattern)
                at = found + len(pattern) - len(carry) if found >= 0 else -1
            if 0 <= at < len(data):
                data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
                armed = bool(not once and pattern)
                with open(once or os.devnull, "w") as file:
                    file.write("flipped")
            carry = (carry + data)[-len(pattern) :] if pattern else b""
        seen += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
