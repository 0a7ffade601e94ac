#!/usr/bin/python3
"""What libbaton_cuda.so is, without running it on a GPU: machine code for three architectures, one symbol, no need of a
driver to be loaded; and what the real object says on a machine without one.

    cuda_object_test.py LIBRARY DEVICE_TEST"""
import os
import struct
import subprocess
import sys

FATBIN = struct.pack("<I", 0xBA55ED50)
PTX, SASS = 1, 2
WANTED = {(SASS, 80), (SASS, 90), (SASS, 100), (PTX, 100)}
KERNELS = (b"embed_rows", b"norm_rows", b"add_rows", b"rotary_rows", b"silu_rows", b"store_rows", b"mirror_rows", b"attention_rows",
           b"stage_bf16", b"stage_f32", b"combine_rows", b"compare_rows", b"round_rows", b"product_few", b"product_tiles")
NEEDED = {"libcublasLt.so", "libstdc++.so", "libgcc_s.so", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so",
          "ld-linux-x86-64.so", "ld-linux-aarch64.so"}


def images(data):
    """(kind, architecture, bytes) of every image in the object's fat binaries."""
    at = data.find(FATBIN)
    while at >= 0:
        _, header, size = struct.unpack_from("<HHQ", data, at + 4)
        part, end = at + header, at + header + size
        while part < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, part)
            yield kind, struct.unpack_from("<I", data, part + 28)[0], data[part + header:part + header + size]
            part += header + size
        at = data.find(FATBIN, end)


def lines(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main():
    library, device_test = sys.argv[1:3]
    with open(library, "rb") as file:
        found = list(images(file.read()))
    # Without device code a file has empty images; those that hold the kernels are meant.
    for kernel in KERNELS:
        have = {(kind, arch) for kind, arch, image in found if kind == SASS and kernel in image}
        assert have == {each for each in WANTED if each[0] == SASS}, f"{kernel.decode()} has machine code for {sorted(have)}"
    assert any((kind, arch) == (PTX, 100) and len(image) > 4096 for kind, arch, image in found), "no PTX of sm_100"

    symbols = [line.split()[-1] for line in lines("nm", "-D", "--defined-only", library)]
    assert symbols == ["baton_device_table"], f"exported: {symbols}"
    needed = {line.split("[")[1].split("]")[0] for line in lines("readelf", "-d", library) if "(NEEDED)" in line}
    strange = [name for name in needed if name.split(".so")[0] + ".so" not in NEEDED]
    assert not strange, f"needs {strange}: the driver, the runtime and NCCL are looked for at run time"

    run = subprocess.run([device_test, library], capture_output=True, text=True, timeout=100)
    if run.returncode == 77:
        print(run.stdout.strip())
        assert "no CUDA device: " in run.stdout or "cannot be loaded: libcublasLt" in run.stdout, run.stdout
    else:
        assert os.path.exists("/dev/nvidia0"), f"no device, yet: {run.returncode} {run.stdout} {run.stderr}"


if __name__ == "__main__":
    main()
