"""The system call filter of the sandbox, as a BPF program for bubblewrap and as a profile for container engines.

It denies calls that reach other namespaces, other processes or kernel facilities, calls that keep memory outside of any
process's address space, and sockets other than local and Internet ones (AF_VSOCK reaches a virtual machine's host from
any network namespace). All other calls are allowed: namespaces and resource limits bound their effect.

Sources of the numbers: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h; of the
instruction format: include/uapi/linux/filter.h; of the filter's input: struct seccomp_data in
include/uapi/linux/seccomp.h.
"""

from __future__ import annotations

import errno
import platform
import struct

from slimx.errors import SlimxError

# Denied calls, with their numbers on x86-64 and on 64-bit Arm. Calls since Linux 5.2 have the same number on both.
_DENIED = {
    # Namespaces and mounts.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442), "sethostname": (170, 161),
    "setdomainname": (171, 162), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438),
    # Kernel facilities.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "personality": (135, 92), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Memory that outlives a mapping, and is in no process's resident set.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75),
}  # fmt: skip
_CLONE = (56, 220)
_CLONE3 = 435
_SOCKET = (41, 198)
_NEW_NAMESPACE = 0x7E020000
"""Mask of CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID and CLONE_NEWNET."""
_FAMILIES = (1, 2, 10)
"""Allowed address families of sockets: AF_UNIX, AF_INET and AF_INET6."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""For each supported value of `platform.machine`: index of its system call numbers in `_DENIED`, and its AUDIT_ARCH
constant."""
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_BITS = 0x45
_RETURN = 0x06
_NUMBER = 0
"""Offset of the system call number in seccomp_data."""
_ARCH = 4
"""Offset of the architecture in seccomp_data."""
_ARGUMENT = 16
"""Offset of the lower half of the first argument in seccomp_data."""
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_FAIL = 0x00050000


def program() -> bytes:
    """Returns the filter for this machine in the format of bubblewrap's option --seccomp.

    Denied calls fail with EPERM. clone3, whose flags a filter cannot read, fails with ENOSYS, after which the C library
    uses clone. Raises SlimxError on machines other than x86-64 and 64-bit Arm.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise SlimxError(
            f"the sandbox does not support {machine} machines; use an x86_64 or aarch64 machine, or remove from the "
            "configuration the hooks that run code",
            code="sandbox.machine",
            about=machine,
        )
    column, arch = _MACHINES[machine]
    code = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, arch, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        # On x86-64, higher numbers belong to the x32 ABI; on Arm, they do not exist.
        _step(_AT_LEAST, 0x40000000, 0, 1),
        _step(_RETURN, _KILL),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _FAIL | errno.EPERM)]
    code += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS)]
    code += [
        _step(_EQUAL, _CLONE[column], 0, 4),
        _step(_LOAD, _ARGUMENT),
        _step(_BITS, _NEW_NAMESPACE, 0, 1),
        _step(_RETURN, _FAIL | errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    code += [_step(_EQUAL, _SOCKET[column], 0, 2 + len(_FAMILIES)), _step(_LOAD, _ARGUMENT)]
    code += [_step(_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)]
    code += [_step(_RETURN, _FAIL | errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)]
    return b"".join(code)


def profile() -> dict[str, object]:
    """Returns the same filter as `program`, in the JSON format that container runtimes read (`--security-opt
    seccomp=FILE`).

    The OCI runtime specification defines this format (config-linux, seccomp). Raises SlimxError on the same machines as
    `program`.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        program()  # raises
    column = _MACHINES[machine][0]

    def denied(names: list[str], error: int, *conditions: dict[str, object]) -> dict[str, object]:
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": list(conditions)}

    def first(operation: str, value: int, two: int = 0) -> dict[str, object]:
        return {"index": 0, "value": value, "valueTwo": two, "op": f"SCMP_CMP_{operation}"}

    spaces = [1 << bit for bit in range(32) if _NEW_NAMESPACE >> bit & 1]
    others = [family for family in range(max(_FAMILIES)) if family not in _FAMILIES]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [_ARCHITECTURES[machine]],  # denies calls of other architectures
        "syscalls": [
            denied([name for name, numbers in _DENIED.items() if numbers[column] is not None], errno.EPERM),
            denied(["clone3"], errno.ENOSYS),
            *(denied(["clone"], errno.EPERM, first("MASKED_EQ", bit, bit)) for bit in spaces),
            *(denied(["socket"], errno.EAFNOSUPPORT, first("EQ", family)) for family in others),
            denied(["socket"], errno.EAFNOSUPPORT, first("GT", max(_FAMILIES))),
        ],
    }


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encodes one BPF instruction. `if_true`, `if_false`: for a jump, number of instructions to skip if its condition
    is true or false, respectively."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)
