"""A cluster whose programs each have a network namespace and an address of their own, and names for the links between them.

A link is named DIALLER>TARGET by member ids ("router-1>decode-2", "prefill-1>etcd"); with "/kv" behind it is the KV link. A
proxied world leads every gRPC link, those to etcd too, through tests/chaos/proxy.py inside the dialler's namespace; the
KV link is never proxied. Clients in namespaces of their own are hosts that the cluster does not know.
"""
import contextlib
import os
import sys

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "integration"))
import harness  # noqa: E402
import net  # noqa: E402
from cluster import Cluster  # noqa: E402

MARK = 0xBA70  # proxy.py
DIALS = {"router": ("decode", "prefill", "etcd"), "prefill": ("decode", "etcd"), "decode": ("etcd",), "etcd": ()}
# Slow steps and several of them for each long prompt: a fault finds requests in every state. Pools for 17 of the largest
# requests each. Leases in etcd as short as the programs allow beside their renewal, so that outages are soon felt.
ARGUMENTS = {
    "router": ["--disaggregate-above", "0"],
    "prefill": ["--test-step-delay", "50ms", "--timer-step", "1s", "--step-tokens", "128", "--max-running", "32"],
    "decode": ["--test-step-delay", "5ms", "--timer-step", "1s"],
    "workers": ["--kv-tokens", "8192", "--link", "tcp", "--test-verify"],
    "all": ["--etcd-lease", "5s", "--etcd-keepalive", "1s"],
}


class World(Cluster):
    def __init__(self, state, arguments=None, proxied=False, model=None):
        given = dict(ARGUMENTS, **(arguments or {}))
        both = {role: ["--threads", "1"] * (role != "router") + given[role] + given["workers"] * (role != "router") +
                given["all"] for role in ("router", "prefill", "decode")}
        super().__init__(state, harness.BUILD, model, arguments=both, dies_with_us=True)
        self.net = net.Net()
        self.proxies = net.Proxies() if proxied else None
        self.links = {}  # name -> (dialler, target, port)
        self.closed = False

    def place(self, id):
        host = self.net.host(id)
        return host.address, host.enter

    def launch(self, member):
        self.link(member)
        return super().launch(member)

    def link(self, member):
        """Names, and leads through the proxy, every link that the member has; before it can dial."""
        others = [each for each in self.members if each is not member]
        pairs = [(member, each) for each in others] + [(each, member) for each in others]
        for dialler, target in pairs:
            if target.role not in DIALS[dialler.role]:
                continue
            name = f"{dialler.id}>{target.id}"
            if name in self.links:
                continue
            port = target.ports["client" if target.role == "etcd" else "grpc"]
            self.links[name] = (dialler.id, target.id, port)
            if dialler.role == "prefill" and target.role == "decode":
                self.links[name + "/kv"] = (dialler.id, target.id, target.ports["kv"])
            if self.proxies is not None:
                host = self.net.host(dialler.id)
                near = self.proxies.listen(name, host.path, target.host, port)
                host.redirects.append(f"meta mark != {MARK} ip daddr {target.host} tcp dport {port} redirect to :{near}")
                host.apply()

    def client_address(self, router, proxied=None):
        """Where clients on this machine find a router: through the link client>ROUTER in a proxied world."""
        if not (self.proxies is not None if proxied is None else proxied):
            return router.address("grpc")
        name = f"client>{router.id}"
        port = self.proxies.tell("set", name)["port"] if name in self.links else self.proxies.listen(
            name, None, router.host, router.ports["grpc"])
        self.links[name] = ("here", router.id, router.ports["grpc"])
        return f"127.0.0.1:{port}"

    def client_host(self, name, router):
        """A namespace for clients of a router, linked as NAME>ROUTER."""
        host = self.net.host(name)
        self.links[f"{name}>{router.id}"] = (name, router.id, router.ports["grpc"])
        return host

    def down(self):
        if self.closed:
            return
        self.closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self.net.close)
            if self.proxies is not None:
                stack.callback(self.proxies.close)
            stack.callback(super().down)

    def lost(self, links, way="both"):
        return self.net.lost([self.links[each] for each in links], way)
