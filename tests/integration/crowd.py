#!/usr/bin/python3
"""A crowd of streaming clients in one process, made to be killed: crowd.py ADDRESS SEED STREAMS fin|rst

Says "started" once all calls are on their way, then one line for each stream that got its first token, and reads until it
is killed. With rst its sockets are set so that the death of the process resets the connections instead of closing them."""
import os
import random
import socket
import stat
import struct
import sys
import threading

from harness import Client, api, filler, grpc, make_request

address, seed, streams, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
draw = random.Random(seed)
clients = [Client(address) for _ in range(4)]
for each in clients:
    each.stub.ListModels(api.ListModelsRequest(), timeout=10)


def follow(stream):
    try:
        next(stream)
        os.write(1, b"first\n")
        for _ in stream:
            pass
    except grpc.RpcError as error:
        os.write(1, f"{error.code().name}: {error.details()}\n".encode())


if end == "rst":
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as peer:
                    if peer.family in (socket.AF_INET, socket.AF_INET6):
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            continue

calls = []
for index in range(streams):
    # Half have long inputs of their own: they queue, are computed and cross when the others stream already.
    prompt = filler(draw.randrange(200, 440), seed * 1000 + index) if index % 2 else filler(draw.randrange(2, 12), index)
    request = make_request(prompt, max_tokens=512 - len(prompt), ignore_eos=True)
    calls.append(clients[index % len(clients)].stream(request, timeout=120))
os.write(1, b"started\n")
threads = [threading.Thread(target=follow, args=(call,), daemon=True) for call in calls]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.write(1, b"all ended\n")
