"""An MCP server for tests, as foreign as any: `python mcp_server.py [sdk]`.

Without a word: standard library only, the handshake of 2025-06-18. With `sdk`: the official package's own server.
"""

import json
import os
import sys
import time

TOOLS = ("add", "read_note", "who", "ping_back", "slow", "fail", "image", "crash", "chatter")


def say(message: dict) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(value: str, **more) -> dict:
    return {"content": [{"type": "text", "text": value}], **more}


def call(name: str, arguments: dict) -> dict:
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "read_note":
        with open("note.txt") as file:
            return text(file.read())
    if name == "who":
        return text(json.dumps({"pid": os.getpid(), "env": os.environ.get("GREETING", "")}))
    if name == "ping_back":  # a request of the server, in the middle of the client's
        say({"id": "from-server", "method": "ping"})
        answer = json.loads(sys.stdin.readline())
        return text(f"{answer['id']} {answer['result']}")
    if name == "slow":
        time.sleep(arguments["seconds"])
        return text("at last")
    if name == "image":
        return {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}
    if name == "chatter":
        for number in range(arguments["count"]):
            say({"method": "notifications/message", "params": {"level": "info", "data": f"line {number} " + "x" * 200}})
        sys.stdout.write("this is no message\n")
        return text("said it")
    if name == "crash":
        print("it burns", file=sys.stderr)
        os._exit(3)
    return text("it cannot be done", isError=True)


def main() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        method, params = request["method"], request.get("params", {})
        if method == "initialize":
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                      "serverInfo": {"name": "plain", "version": "1"}}  # fmt: skip
        elif method == "tools/list":
            result = {"tools": [{"name": name, "description": f"{name} it", "inputSchema": schema} for name in TOOLS]}
        elif method == "tools/call":
            try:
                result = call(params["name"], params.get("arguments", {}))
            except KeyError as error:
                say({"id": request["id"], "error": {"code": -32602, "message": f"{error} is missing"}})
                continue
        else:
            say({"id": request["id"], "error": {"code": -32601, "message": "no such method"}})
            continue
        say({"id": request["id"], "result": result})


def official() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("official")

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    server.run()


if __name__ == "__main__":
    official() if sys.argv[1:] == ["sdk"] else main()
