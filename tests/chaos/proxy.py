#!/usr/bin/python3
"""A TCP proxy that can be cruel to bytes: one process, many links, each with a policy of its own. World starts it.

It reads one JSON command a line and answers each with one line; it ends when its input does. A link listens in the network
namespace of the program that dials, so that a redirect there brings connections here, and dials on from the same place:
addresses on the wire stay true. Its own connections carry MARK, by which the redirect lets them pass.

Ways: "up" is from the dialler to the target, "down" back. A policy of a way:
  delay_ms  bytes arrive so much later
  hold      bytes wait, in order, and arrive when the policy ends
  lost      bytes vanish; a connection that lost some is reset when the policy ends, since TCP has no holes
  rate      bytes a second
  cut       each connection ends (FIN) after so many more bytes: in the middle of a frame
and of a link: refuse (new connections are reset), blind (an end of one side is not told to the other: half-open).
"""
import asyncio
import collections
import contextlib
import ctypes
import json
import os
import socket
import struct
import sys

MARK = 0xBA70
CLONE_NEWNET = 0x40000000
QUEUE_MAX = 256 << 10  # bytes on their way in one direction
LIBC = ctypes.CDLL(None, use_errno=True)


class Spot:
    """A network namespace, by the path of its file; None is where this process is."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else None

    def socket(self):
        """A TCP socket that lives there."""
        if self.fd is None:
            return socket.socket()
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.enter(self.fd)
            return socket.socket()
        finally:
            self.enter(home)
            os.close(home)

    @staticmethod
    def enter(fd):
        if LIBC.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


class Way:
    """One direction of one link: its policy, and what tells sleepers that it changed."""

    def __init__(self):
        self.policy = {}
        self.changed = asyncio.Event()
        self.bytes = 0

    def set(self, policy):
        self.policy = policy
        self.changed.set()
        self.changed = asyncio.Event()

    async def passes(self):
        while self.policy.get("hold"):
            await self.changed.wait()


class Cut(Exception):
    """The connection carried what its policy allows and ends."""


class Connection:
    """Two sockets and what is on its way between them. One task owns it; only that closes the sockets."""

    def __init__(self, link, near):
        self.link = link
        self.near, self.far = near, None
        self.damaged = set()  # ways of which bytes were thrown away
        self.left = {}        # way -> bytes until it is cut
        self.tasks = []
        self.is_ending = False
        self.main = asyncio.ensure_future(self.run())

    async def run(self):
        loop = asyncio.get_running_loop()
        is_reset = True
        try:
            if self.link.refuse:
                return
            self.far = self.link.spot.socket()
            self.far.setblocking(False)
            self.far.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
            await loop.sock_connect(self.far, self.link.target)
            for source, sink, name in ((self.near, self.far, "up"), (self.far, self.near, "down")):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pipe = Pipe()
                self.tasks += [asyncio.ensure_future(self.read(source, pipe, self.link.ways[name])),
                               asyncio.ensure_future(self.write(sink, pipe, self.link.ways[name], name))]
            await asyncio.gather(*self.tasks)
            is_reset = False
        except Cut:
            is_reset = False
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.is_ending = True
            for task in self.tasks:
                task.cancel()
            if self.tasks:
                await asyncio.wait(self.tasks)
            self.link.connections.discard(self)
            for each in (self.near, self.far):
                if each is not None:
                    if is_reset:
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.close()

    async def read(self, source, pipe, way):
        """Notes of each piece when it is due. An empty piece is the end."""
        loop = asyncio.get_running_loop()
        while True:
            while pipe.bytes >= QUEUE_MAX:
                pipe.room.clear()
                await pipe.room.wait()
            await way.passes()
            try:
                data = await loop.sock_recv(source, 65536)
            except OSError:
                if not self.link.blind:
                    raise
                data = b""
            if not data and self.link.blind:
                await asyncio.Event().wait()  # it is gone, and nobody is told
            pipe.put(loop.time() + way.policy.get("delay_ms", 0) / 1000, data)
            if not data:
                return

    async def write(self, sink, pipe, way, name):
        loop = asyncio.get_running_loop()
        while True:
            due, data = await pipe.get()
            await asyncio.sleep(max(0, due - loop.time()))
            await way.passes()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            if way.policy.get("lost") or name in self.damaged:
                self.damaged.add(name)
                continue
            while data:
                data = await self.write_piece(sink, way, name, data)

    async def write_piece(self, sink, way, name, data):
        """Writes as much as the policy lets pass at once; returns the rest."""
        rate, limit = way.policy.get("rate"), way.policy.get("cut")
        piece = data[:max(1, rate // 50)] if rate else data
        if limit is None:
            self.left.pop(name, None)
        else:
            piece = piece[:self.left.setdefault(name, limit)]
            self.left[name] -= len(piece)
        try:
            await asyncio.get_running_loop().sock_sendall(sink, piece)
        except OSError:
            if not self.link.blind:
                raise
            self.damaged.add(name)
            return b""
        way.bytes += len(piece)
        if self.left.get(name) == 0:
            raise Cut
        if rate:
            await asyncio.sleep(len(piece) / rate)
        await way.passes()
        return data[len(piece):]

    def end(self):
        """Resets both sides; once: a second cancel would reach what cleans up after the first."""
        if not self.is_ending:
            self.is_ending = True
            self.main.cancel()

    def lose(self, side):
        """One side's socket is shut down; while the link is blind the other side does not hear of it."""
        lost = self.near if side == "near" else self.far
        if lost is not None:
            with contextlib.suppress(OSError):
                lost.shutdown(socket.SHUT_RDWR)


class Pipe:
    """What is on its way in one direction of a connection."""

    def __init__(self):
        self.queue = collections.deque()
        self.bytes = 0
        self.more, self.room = asyncio.Event(), asyncio.Event()

    def put(self, due, data):
        self.queue.append((due, data))
        self.bytes += len(data)
        self.more.set()

    async def get(self):
        while not self.queue:
            self.more.clear()
            await self.more.wait()
        due, data = self.queue.popleft()
        self.bytes -= len(data)
        self.room.set()
        return due, data


class Link:
    def __init__(self, command):
        self.spot = Spot(command["spot"])
        self.target = (command["target"][0], command["target"][1])
        self.ways = {"up": Way(), "down": Way()}
        self.connections = set()
        self.refuse = self.blind = False
        self.accepted = 0
        self.listener = self.spot.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.task = asyncio.ensure_future(self.accept())

    async def accept(self):
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self.listener)
            near.setblocking(False)
            self.accepted += 1
            self.connections.add(Connection(self, near))

    def set(self, command):
        """The whole policy at once: what is not named is off."""
        self.refuse = command.get("refuse", False)
        was_blind, self.blind = self.blind, command.get("blind", False)
        for name, way in self.ways.items():
            way.set(command.get(name) or {})
        if not any(way.policy.get("lost") for way in self.ways.values()):
            for each in [each for each in self.connections if each.damaged]:
                each.end()
        if was_blind and not self.blind:
            self.reset()

    def reset(self):
        for each in list(self.connections):
            each.end()

    def lose(self, side):
        for each in list(self.connections):
            each.lose(side)


class Proxy:
    def __init__(self):
        self.links = {}

    def obey(self, command):
        name, link = command["link"], self.links.get(command["link"])
        if command["do"] == "listen":
            link = self.links[name] = Link(command)
        elif command["do"] == "set":
            link.set(command)
        elif command["do"] == "reset":
            link.reset()
        elif command["do"] == "lose":
            link.lose(command["side"])
        return {"port": link.listener.getsockname()[1], "connections": len(link.connections), "accepted": link.accepted,
                "up": link.ways["up"].bytes, "down": link.ways["down"].bytes}

    async def run(self):
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: None)  # connections that end while they are being ended
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        while True:
            line = await commands.readline()
            if not line:
                return
            try:
                answer = self.obey(json.loads(line))
            except Exception as error:  # told to the test, which fails by it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(Proxy().run())
