"""Which system calls may be made inside a sandbox, as a BPF program that the inside loads before any foreign code.

Everything that is not on the list answers "no such system call" (ENOSYS), which the C library takes as "old kernel"
and works around; what is known to be dangerous answers "not permitted" (EPERM), so that the program's own error is
clear. The list is that of the container engines' default profile without what needs a capability.
A foreign architecture or the x32 interface ends the process. What it does not do: look behind pointers (no seccomp
filter can), so paths are the mount namespace's matter.
"""

from __future__ import annotations

import errno
import functools
import tempfile

ALLOWED = """
accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_getres
clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat
faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr
flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_waitv futimesat get_robust_list
get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid
getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt
gettid gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl ioprio_get
kill lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise
membarrier mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify
mq_timedreceive mq_timedsend mq_unlink mremap msync munlock munlockall munmap
nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
pkey_mprotect poll ppoll prctl pread64 preadv preadv2 pselect6 pwrite64 pwritev pwritev2 read readahead
readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr rename renameat renameat2
restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_yield seccomp select
sendfile sendmmsg sendmsg sendto set_robust_list set_tid_address setfsgid setfsuid setgid setgroups
setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr
shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink symlinkat sync
sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat
utime utimensat utimes vfork wait4 waitid write writev
"""

UNCOUNTED = """
memfd_create mq_open msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget
"""
"""Make memory that belongs to no process: allowed only where a cgroup counts it."""

FORBIDDEN = """
acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init finit_module
fsconfig fsmount fsopen fspick get_mempolicy init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl
ioprio_set kcmp kexec_file_load kexec_load keyctl lookup_dcookie mbind memfd_secret migrate_pages modify_ldt mount
mount_setattr move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open
pidfd_getfd pivot_root process_madvise process_mrelease process_vm_readv process_vm_writev ptrace quotactl
quotactl_fd reboot request_key sched_setattr sched_setparam sched_setscheduler set_mempolicy setdomainname
sethostname setns settimeofday swapoff swapon sysfs syslog umount umount2 unshare uselib userfaultfd ustat vhangup
vmsplice
"""

HINT = "pip install pyseccomp; apt install libseccomp2 (Debian, Ubuntu), dnf install libseccomp (Fedora)"
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. Others, such as AF_VSOCK, are not confined by a network namespace."""
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
PERSONALITIES = (0x0, 0x40000, 0xFFFFFFFF)
"""Linux, Linux without address randomization (debuggers ask for it), and the question which one it is."""


@functools.cache
def program(*, memory_is_counted: bool) -> bytes:
    """The filter as an array of `struct sock_filter` for this machine's architecture.

    Errors: ImportError where pyseccomp or libseccomp is missing.
    """
    import pyseccomp

    rules = pyseccomp.SyscallFilter(defaction=pyseccomp.ERRNO(errno.ENOSYS))
    rules.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)  # a binary tree: faster to load and to run than a list

    def add(action: int, name: str, *arguments: pyseccomp.Arg) -> None:
        if pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) >= 0:
            rules.add_rule(action, name, *arguments)

    for name in f"{ALLOWED} {UNCOUNTED if memory_is_counted else ''}".split():
        add(pyseccomp.ALLOW, name)
    for name in FORBIDDEN.split():
        add(pyseccomp.ERRNO(errno.EPERM), name)
    # clone3 hides its flags behind a pointer: answering ENOSYS makes the C library use clone.
    add(pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, NEW_NAMESPACES, 0))
    for family in FAMILIES:
        add(pyseccomp.ALLOW, "socket", pyseccomp.Arg(0, pyseccomp.EQ, family))
    for personality in PERSONALITIES:
        add(pyseccomp.ALLOW, "personality", pyseccomp.Arg(0, pyseccomp.EQ, personality))
    # Limits of the own process only: process 1 of a sandbox has the same user and would have to suffer them.
    add(pyseccomp.ALLOW, "prlimit64", pyseccomp.Arg(0, pyseccomp.EQ, 0))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
