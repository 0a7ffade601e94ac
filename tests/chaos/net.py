"""Network namespaces with addresses of their own on one bridge, and faults on the wires between them.

Nothing here has a name outside: namespaces are held by descriptors of this process, so that they, their wires, filters and
queues are gone with it however it ends, SIGKILL included. Programs find them as /proc/PID/fd/N. What this machine's own
network sees is one interface that ends in the hub; its other end takes it along. Needs root, ip, nft, tc and ss.
"""
import contextlib
import ctypes
import json
import os
import random
import subprocess
import sys

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
# 198.18.0.0/15 is set aside for measuring networks (RFC 2544): nobody's real addresses.
SUBNETS = [f"198.{18 + index // 256}.{index % 256}" for index in range(512)]
HERE = os.path.dirname(os.path.abspath(__file__))


class NoNetwork(Exception):
    """Namespaces cannot be made here; says what is missing."""


def read(path):
    with open(path, "rb") as file:
        return file.read()


def tool(argv, text=None):
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise NoNetwork(f"{error.filename} is not there; tools/setup installs it") from None
    if done.returncode != 0:
        raise NoNetwork(f"'{' '.join(argv)}' failed with {done.returncode}: {done.stderr.strip()}\n{text or ''}")
    return done.stdout


def new_namespace():
    """A descriptor of a new network namespace. The calling thread stays where it is."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if LIBC.unshare(CLONE_NEWNET) != 0:
            raise NoNetwork(f"a network namespace cannot be made: {os.strerror(ctypes.get_errno())}. These tests need root "
                            "and a kernel with network namespaces")
        try:
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            if LIBC.setns(home, CLONE_NEWNET) != 0:
                raise SystemExit("this thread cannot return to its own network namespace")
    finally:
        os.close(home)


class Host:
    """One namespace with one address. `drops` are the filter rules that are on now."""

    def __init__(self, name, address, fd):
        self.name = name
        self.address = address
        self.fd = fd
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.drops = []
        self.redirects = []

    def run(self, *argv, text=None):
        return tool(["nsenter", f"--net={self.path}", "--", *argv], text)

    @property
    def enter(self):
        """Words before a command line that run it here. /sys shows the interfaces of whoever mounted it, and UCX looks there."""
        return ["nsenter", f"--net={self.path}", "--", "unshare", "--mount", "--", "sh", "-c",
                'mount -t sysfs -o ro sysfs /sys && exec "$@"', "sh"]

    def apply(self):
        rules = "".join(f"  {rule}\n" for rule in self.drops)
        redirects = "".join(f"  {rule}\n" for rule in self.redirects)
        self.run("nft", "-f", "-", text=(
            "table ip chaos\nflush table ip chaos\ntable ip chaos {\n"
            f" chain input {{\n  type filter hook input priority 0; policy accept;\n{rules} }}\n"
            f" chain detour {{\n  type nat hook output priority -100; policy accept;\n{redirects} }}\n}}\n"))


class Net:
    """The hub, its hosts, and the faults that are on."""

    def __init__(self):
        self.hosts = {}
        self.hub = Host("hub", None, new_namespace())
        self.prefix = self.free_subnet()
        self.here = f"{self.prefix}.1"
        self.next = 10
        name = f"chaos{os.getpid()}"
        with contextlib.suppress(NoNetwork):  # of a Net that this process closed a moment ago
            tool(["ip", "link", "del", name])
        self.hub.run("ip", "-batch", "-", text="link set lo up\nlink add bridge type bridge\nlink set bridge up\n")
        tool(["ip", "link", "add", name, "type", "veth", "peer", "name", "out", "netns", self.hub.path])
        self.hub.run("ip", "-batch", "-", text="link set out master bridge\nlink set out up\n")
        tool(["ip", "addr", "add", f"{self.here}/24", "dev", name])
        tool(["ip", "link", "set", name, "up"])

    @staticmethod
    def free_subnet():
        taken = {address["local"].rsplit(".", 1)[0] for interface in json.loads(tool(["ip", "-json", "-4", "addr"]))
                 for address in interface.get("addr_info", []) if "local" in address}
        return random.choice([each for each in SUBNETS if each not in taken])

    def host(self, name):
        """The host of that name, made when first asked for."""
        if name not in self.hosts:
            host = Host(name, f"{self.prefix}.{self.next}", new_namespace())
            port = f"p{self.next}"
            self.next += 1
            self.hub.run("ip", "-batch", "-", text=(
                f"link add {port} type veth peer name wire netns {host.path}\n"
                f"link set {port} master bridge\nlink set {port} up\n"))
            host.run("ip", "-batch", "-", text=(
                f"link set lo up\naddr add {host.address}/24 dev wire\nlink set wire up\n"))
            host.apply()
            self.hosts[name] = host
        return self.hosts[name]

    def close(self):
        """Everything is gone once the programs in it are gone too."""
        for each in list(self.hosts.values()) + [self.hub]:
            os.close(each.fd)
        self.hosts = {}

    # ---- faults. `wires`: (dialler, target, port) with host names; dialler "here" is this machine's own address.

    def address(self, name):
        return self.here if name == "here" else self.hosts[name].address

    def losses(self, wire, way):
        """(host, rule) that drop the packets of one way where they arrive: a true loss, nobody is told."""
        dialler, target, port = wire
        port = f" tcp {{}} {port}" if port else ""
        rules = []
        if way in ("up", "both") and target in self.hosts:
            rules.append((self.hosts[target], f"ip saddr {self.address(dialler)}{port.format('dport')} drop"))
        if way in ("down", "both") and dialler in self.hosts:
            rules.append((self.hosts[dialler], f"ip saddr {self.address(target)}{port.format('sport')} drop"))
        if way in ("down", "both") and dialler not in self.hosts:
            # There is no filter on this machine's own network: what goes there is dropped in the hub's bridge.
            raise ValueError("packets to this machine cannot be dropped: give the dialler a host of its own")
        return rules

    @contextlib.contextmanager
    def lost(self, wires, way="both"):
        """Packets of these wires vanish for the length of a with block."""
        rules = [rule for wire in wires for rule in self.losses(wire, way)]
        for host, rule in rules:
            host.drops.append(rule)
        touched = {host for host, _ in rules}
        for host in touched:
            host.apply()
        try:
            yield
        finally:
            for host, rule in rules:
                host.drops.remove(rule)
            for host in touched:
                host.apply()

    def reset(self, wire):
        """Both ends of every connection of a wire are reset by the kernel; returns how many ends."""
        dialler, target, port = wire
        count = 0
        for name, other, which in ((target, dialler, "sport"), (dialler, target, "dport")):
            if name in self.hosts:
                count += len(self.hosts[name].run("ss", "-K", "-H", "-t", "-n", "dst", self.address(other), which, "=",
                                                  f":{port}").splitlines())
        return count

    @contextlib.contextmanager
    def throttled(self, dialler, port, bytes_a_second):
        """What a host sends to this port of anybody passes a token bucket; everything else does not."""
        rate = f"{bytes_a_second * 8}bit"
        host = self.hosts[dialler]
        host.run("tc", "qdisc", "add", "dev", "wire", "root", "handle", "1:", "htb")
        try:
            host.run("tc", "class", "add", "dev", "wire", "parent", "1:", "classid", "1:1", "htb", "rate", rate,
                     "burst", "16k", "cburst", "16k", "quantum", "4000")
            host.run("tc", "qdisc", "add", "dev", "wire", "parent", "1:1", "handle", "10:", "tbf", "rate", rate,
                     "burst", "16k", "latency", "500ms")
            host.run("tc", "filter", "add", "dev", "wire", "parent", "1:", "protocol", "ip", "u32", "match", "ip", "dport",
                     str(port), "0xffff", "flowid", "1:1")
            yield
        finally:
            host.run("tc", "qdisc", "del", "dev", "wire", "root")


class Proxies:
    """The process of proxy.py and its links by name."""

    def __init__(self):
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, os.path.join(HERE, "proxy.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(self, do, link, **more):
        self.process.stdin.write(json.dumps(dict(more, do=do, link=link)) + "\n")
        answer = json.loads(self.process.stdout.readline() or '{"error": "the proxy is gone"}')
        if "error" in answer:
            raise RuntimeError(f"proxy: {do} {link}: {answer['error']}")
        return answer

    def listen(self, link, spot, address, port):
        """The port on 127.0.0.1 of `spot` (a namespace's path; None: here) from which connections go to address:port."""
        return self.tell("listen", link, spot=spot, target=[address, port])["port"]

    @contextlib.contextmanager
    def policy(self, links, **policy):
        for link in links:
            self.tell("set", link, **policy)
        try:
            yield
        finally:
            for link in links:
                self.tell("set", link)

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()
