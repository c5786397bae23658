r"""Runs a C++ test program on an emulated processor with instructions that this machine may lack.

Usage: python scripts/emulated_tests.py [options] build/dev/tests/cpp/kernels_test [arguments of it]

Bochs emulates the processor, by default one with AVX-512, VNNI and bfloat16 dot products, and boots
a kernel of the system whose only program is the test. That takes 20 s; the program then runs 50 to
200 times as slowly as on a processor. Bochs 3.0 is the first that knows the bfloat16 instructions.
Where denormals are flushed it also flushes the difference of two numbers of one exponent if it has
the least exponent that is not a denormal's, which the first line mends in its unpacked source:

    sed -i 's/if (!expZ && sigDiff)/if (!expZ \&\& (sigDiff << shiftDist) < 0x800000)/' \
      cpu/softfloat3e/s_subMagsF32.c
    ./configure --enable-x86-64 --enable-avx --enable-evex --enable-vmx=2 --enable-pci \
      --enable-handlers-chaining --enable-repeat-speedups --enable-fast-function-calls \
      --with-nogui --disable-docbook && make

Debian's packages for the rest: linux-image-cloud-amd64 busybox-static cpio grub-pc-bin grub-common
xorriso mtools bochsbios vgabios.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("busybox", "cpio", "grub-mkrescue", "xorriso", "ldd")
PROCESSOR = "sapphire_rapids"
NO_KERNEL = Path("/boot/vmlinuz")
# What the kernels do not need, and an unpatched kernel stumbles over in Bochs 3.0.
WITHOUT = "amx,amx_bf16,amx_int8,la57,uintr,cet"
KERNEL_OPTIONS = (
    "console=ttyS0 quiet mitigations=off nokaslr no5lvl tsc=reliable rdinit=/init"
    " clearcpuid=smap,smep,pku,umip,fsrm,erms"
)
BEGIN, END = "== begins", "== ended with "

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
echo "{begin}"
echo "on" $(grep -o 'avx512[a-z_0-9]*' /proc/cpuinfo | sort -u)
/test {arguments}
echo "{end}$?"
sleep 1
poweroff -f
"""

BOCHSRC = """romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model={model}, count=1, ips=50000000, reset_on_triple_fault=0, ignore_bad_msrs=1{features}
megs: {memory}
memory: guest={memory}, host={memory}
ata0-master: type=cdrom, path={folder}/disk.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/serial.txt
display_library: nogui
log: {folder}/bochs.log
panic: action=fatal
clock: sync=none, time0=local
"""


def main() -> int:
    """The test's exit code; 1 where it could not be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path, help="the test program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is called with")
    parser.add_argument("--bochs", default="bochs", help="the emulator (default: of PATH)")
    parser.add_argument("--kernel", type=Path, help="a Linux kernel (default: the newest in /boot)")
    parser.add_argument("--model", default=PROCESSOR, help=f"processor (default: {PROCESSOR})")
    parser.add_argument("--memory", type=int, default=2048, help="MiB (default: 2048)")
    options = parser.parse_args()
    kernel = options.kernel or newest_kernel()
    missing = [tool for tool in (options.bochs, *TOOLS) if shutil.which(tool) is None]
    missing += [str(path) for path in (options.program, kernel) if not path.is_file()]
    if missing:
        print(f"not found: {', '.join(missing)}; see --help for what to install", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_disk(folder, kernel, options.program, options.arguments)
        features = f', exclude_features="{WITHOUT}"' if options.model == PROCESSOR else ""
        text = BOCHSRC.format(
            model=options.model, features=features, memory=options.memory, folder=folder
        )
        (folder / "bochsrc").write_text(text, encoding="utf-8")
        return run(folder, options.bochs)


def newest_kernel() -> Path:
    """The kernel of the highest version in /boot."""
    found = Path("/boot").glob("vmlinuz-*")
    return max(
        found, key=lambda path: [*map(int, re.findall(r"\d+", path.name))], default=NO_KERNEL
    )


def make_disk(folder: Path, kernel: Path, program: Path, arguments: list[str]) -> None:
    """Writes a disk that boots into the program: a kernel, and the program with its libraries."""
    root, boot = folder / "root", folder / "iso" / "boot"
    for name in ("bin", "proc", "sys", "dev", "tmp"):
        (root / name).mkdir(parents=True)
    (boot / "grub").mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), root / "bin" / "busybox")
    shutil.copy(program, root / "test")
    told = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for library in re.findall(r"(/\S+) \(0x", told):
        target = root / library.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    init = root / "init"
    text = INIT.format(begin=BEGIN, end=END, arguments=shlex.join(arguments))
    init.write_text(text, encoding="utf-8")
    init.chmod(0o755)
    subprocess.run(
        f"cd '{root}' && find . | cpio --quiet -o -H newc | gzip -1 > '{boot}/initrd'",
        shell=True,
        check=True,
    )
    shutil.copy(kernel, boot / "vmlinuz")
    menu = f"linux /boot/vmlinuz {KERNEL_OPTIONS}\n initrd /boot/initrd"
    (boot / "grub" / "grub.cfg").write_text(
        f'set timeout=0\nmenuentry "test" {{ {menu}\n}}\n', encoding="utf-8"
    )
    command: list[str | Path] = ["grub-mkrescue", "-o", folder / "disk.iso", folder / "iso"]
    subprocess.run(command, check=True, capture_output=True)


def run(folder: Path, bochs: str) -> int:
    """Boots the disk, and prints what the program writes as it comes."""
    serial, log = folder / "serial.txt", folder / "bochs.txt"
    serial.touch()
    with log.open("wb") as output:
        command: list[str | Path] = [bochs, "-q", "-f", folder / "bochsrc"]
        emulator = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        shown = False
        for line in lines(serial, emulator):
            if line.startswith(END):
                return int(line.removeprefix(END))
            if shown:
                print(line, flush=True)
            shown = shown or line.startswith(BEGIN)
    finally:
        emulator.kill()
        emulator.wait()
    print(log.read_text(encoding="utf-8", errors="replace")[-2000:], file=sys.stderr)
    print("the emulator ended before the test did", file=sys.stderr)
    return 1


def lines(serial: Path, emulator: subprocess.Popen[bytes]) -> Iterator[str]:
    """The whole lines of a file that an emulator writes, until it ends."""
    with serial.open(encoding="utf-8", errors="replace", newline="") as read:
        begun = ""
        while True:
            ended = emulator.poll() is not None
            begun += read.readline()
            if begun.endswith("\n"):
                yield begun.rstrip("\r\n")
                begun = ""
            elif ended:
                return
            else:
                time.sleep(0.2)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the emulator and its folder
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
