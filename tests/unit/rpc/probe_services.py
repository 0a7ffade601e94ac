"""Asks a server for its health and its descriptors with the stock Python gRPC, and rebuilds the
service from what reflection returns. Usage: probe_services.py PORT. Prints "ok"."""
import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

channel = grpc.insecure_channel("127.0.0.1:" + sys.argv[1])


def reflect(package, tag, text):
    call = channel.stream_stream("/%s.ServerReflection/ServerReflectionInfo" % package)
    raw = bytes([tag << 3 | 2, len(text)]) + text.encode()
    answers = list(call(iter([raw]), timeout=10))
    assert len(answers) == 1, answers
    return answers[0]


def files_of(answer, pool, response_type):
    response = response_type.FromString(answer)
    files = response.file_descriptor_response.file_descriptor_proto
    assert files, response
    return [descriptor_pb2.FileDescriptorProto.FromString(f) for f in files]


# Bootstrap: the reflection messages themselves come from the server, once parsed by hand (field 4, field 1).
def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
        shift += 7


def fields(data):
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag & 7 == 0:
            value, at = varint(data, at)
        else:
            length, at = varint(data, at)
            value, at = data[at:at + length], at + length
        yield tag >> 3, value


for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha"):
    answer = dict(fields(reflect(package, 4, package + ".ServerReflection")))
    pool = descriptor_pool.DescriptorPool()
    for number, raw in fields(answer[4]):
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
    service = pool.FindServiceByName(package + ".ServerReflection")
    method = service.methods_by_name["ServerReflectionInfo"]
    response_type = message_factory.MessageFactory(pool).GetPrototype(method.output_type)

    listed = response_type.FromString(reflect(package, 7, "*"))
    names = {s.name for s in listed.list_services_response.service}
    assert names == {"t.T", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                     "grpc.reflection.v1alpha.ServerReflection"}, names

    for file in files_of(reflect(package, 4, "grpc.health.v1.Health.Watch"), pool, response_type):
        pool.Add(file)
    check = pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]
    factory = message_factory.MessageFactory(pool)
    request, reply = (factory.GetPrototype(t) for t in (check.input_type, check.output_type))
    stub = channel.unary_unary("/grpc.health.v1.Health/Check", request.SerializeToString, reply.FromString)
    assert stub(request(service="t.T"), timeout=10).status == 1
    assert stub(request(), timeout=10).status == 2
    try:
        stub(request(service="no.Such"), timeout=10)
        assert False
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.NOT_FOUND, error

    missing = response_type.FromString(reflect(package, 4, "no.Such"))
    assert missing.error_response.error_code == 5, missing
    assert missing.original_request.file_containing_symbol == "no.Such"

try:
    channel.unary_unary("/t.T/Nothing")(b"", timeout=10)
    assert False
except grpc.RpcError as error:
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED and "t.T" in error.details(), error

watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=10)
assert next(watch) == b"\x08\x02"
watch.cancel()
print("ok")
