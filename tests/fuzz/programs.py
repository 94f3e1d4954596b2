"""Hostile Python programs, combined from fragments. A failing fragment does not stop the next fragments."""

from __future__ import annotations

from random import Random

PREAMBLE = """\
import ctypes, json, mmap, os, resource, shutil, signal, socket, subprocess, sys, threading, time
given = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def alone(act):
    if os.fork() == 0:
        try:
            act()
        finally:
            os._exit(0)
def daemon(act):
    def inner():
        os.setsid()
        alone(act)
    alone(inner)
def thread(act):
    threading.Thread(target=act, daemon=True).start()
def again(act):
    for _ in range(50):
        act()
def here(act):
    act()
def safe(act, way):
    try:
        way(act)
    except BaseException as error:
        print(type(error).__name__, flush=True)
"""

FILES = (
    "open('f{n}', 'wb').write(bytes({big}))",
    "fd = os.open('g{n}', os.O_CREAT | os.O_RDWR); os.unlink('g{n}'); os.posix_fallocate(fd, 0, {big});"
    " kept.append(fd)",
    "kept.append(os.open('.', os.O_TMPFILE | os.O_RDWR)); os.ftruncate(kept[-1], {big});"
    " os.write(kept[-1], bytes({big}))",
    "[open(f'e{n}_{{i}}', 'w').close() for i in range({many})]",
    "[os.mkdir(f'd{n}_{{i}}') for i in range({many})]",
    "[(os.mkdir('d'), os.chdir('d')) for _ in range({many})]",
    "[(os.mkdir('n' * 200), os.chdir('n' * 200)) for _ in range(60)]",
    "[os.symlink('t' * 4000, f'l{n}_{{i}}') for i in range({many})]",
    "os.symlink('/', 'root{n}'); os.symlink('loop{n}', 'loop{n}'); os.symlink(given['outside'], 'out{n}')",
    "open('out{n}/marked', 'w').write(given['mark'])",
    "os.link(given['outside'] + '/secret', 'hard{n}')",
    "os.mkfifo('pipe{n}'); open('pipe{n}').read()",
    "os.mknod('device{n}', 0o60666, os.makedev(8, 0)); open('device{n}', 'rb').read(1)",
    "os.mkdir('locked{n}'); open('locked{n}/x', 'w').close(); os.chmod('locked{n}', 0); os.chmod('.', 0)",
    "open('a\\nb\\udcff{n}', 'w').close(); open('-rf', 'w').close()",
    "shutil.rmtree('.')",
    "os.rename('.', '../{n}'); os.chdir('..'); open(given['mark'], 'w').close()",
    "os.rmdir(os.getcwd())",
    "os.setxattr('.', 'user.x', bytes(4000))",
    "open('sparse{n}', 'wb').truncate(1 << 40)",
    "m = mmap.mmap(os.open('m{n}', os.O_CREAT | os.O_RDWR), 0); kept.append(m)",
    "kept.append(libc.memfd_create(b'x', 0)); os.write(kept[-1], bytes({big}))",
    "os.unlink('main.py'); os.symlink(given['outside'] + '/secret', 'main.py')",
)
OUTSIDE = (
    "open(given['outside'] + '/secret', 'w').write('x')",
    "print(open(given['outside'] + '/secret').read())",
    "open(given['outside'] + '/' + given['mark'], 'w').close()",
    "[open(place + given['mark'], 'w').close() for place in ('/tmp/', '/', '/dev/shm/', '/var/tmp/',"
    " '/home/', '../', '../../', given['project'] + '/')]",
    "os.unlink(given['outside'] + '/secret')",
    "os.chmod(given['outside'], 0o777); os.chown(given['outside'], 1, 1)",
    "os.utime(given['outside'] + '/secret', (1, 1))",
    "shutil.rmtree(given['outside'])",
    "open('/proc/sys/kernel/core_pattern', 'w').write('x'); open('/proc/sysrq-trigger', 'w').write('c')",
    "[print(open(f'/proc/{{given[\"pid\"]}}/{{name}}').read()) for name in ('environ', 'maps', 'stat')]",
    "open(f'/proc/{{given[\"pid\"]}}/mem', 'wb').write(b'x');"
    " open(f'/proc/{{given[\"pid\"]}}/oom_score_adj', 'w').write('1000')",
    "print(os.listdir('/proc')); print(os.listdir('/proc/self/fd')); print(open('/proc/self/mountinfo').read())",
    "[print(os.read(fd, 10)) for fd in range(3, 64)]",
    '[os.write(fd, b\'{{"exit": 0, "active": {{}}}}\\n\') for fd in range(3, 64)]',
    "[os.close(fd) for fd in range(0, 64)]",
    "libc.mount(b'none', b'/', b'tmpfs', 0, None); os.chroot('/'); os.setuid(0)",
    "libc.unshare(0x10000000); libc.setns(3, 0); libc.ptrace(16, given['pid'], 0, 0)",
    "subprocess.run(['/bin/sh', '-c', 'mount; umount -a; reboot; sysctl -w x=1; kill -9 -1'])",
    "s = socket.socket(); s.connect(('127.0.0.1', 22))",
    "socket.socketpair(); kept.append(socket.create_server(('0.0.0.0', 0)))",
    "socket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
    "shm = libc.shmget(0x5eed, 4096, 0o1666); print(shm); libc.semget(0x5eed, 1, 0o1666); libc.msgget(0x5eed, 0o1666)",
    "fd = libc.shm_open(given['mark'].encode(), 0o102, 0o666); os.write(fd, b'x')",
    "open('/dev/shm/' + given['mark'], 'w').close()",
)
PROCESSES = (
    "[alone(lambda: time.sleep(60)) for _ in range({few})]",
    "[thread(lambda: time.sleep(60)) for _ in range({few})]",
    "while True: alone(lambda: time.sleep(60))",
    "daemon(lambda: time.sleep(60)); daemon(lambda: time.sleep(60))",
    "os.setsid(); os.setpgid(0, 0)",
    "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', given['mark']])",
    "subprocess.Popen(['/bin/sh', '-c', 'trap \"\" TERM INT HUP; sleep 60 & sleep 60', given['mark']])",
    "os.kill(given['pid'], {signal}); os.kill(-1, {signal}); os.kill(1, {signal}); os.kill(os.getppid(),"
    " {signal}); os.kill(0, {signal})",
    "[signal.signal(n, signal.SIG_IGN) for n in range(1, 64) if n not in (9, 19)]",
    "os.kill(os.getpid(), {signal})",
    "os.kill(os.getppid(), signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)",
    "libc.vfork()",
    "libc.syscall(60, 0)",
    "libc.prctl(4, 0, 0, 0, 0); libc.prctl(15, given['mark'].encode(), 0, 0, 0); libc.prctl(1, 0, 0, 0, 0)",
    "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1)); os.nice(-20)",
    "os.sched_setaffinity(given['pid'], [0]); os.setpriority(os.PRIO_PROCESS, given['pid'], 19)",
    "time.sleep(60)",
    "while True: pass",
    "signal.pause()",
    "os._exit({few})",
    "sys.exit(given['mark'])",
    "ctypes.string_at(0)",
    "sys.setrecursionlimit(10 ** 9); f = lambda f: f(f); f(f)",
    "os.abort()",
    "9 ** 9 ** 9",
    "import re; re.match('(a+)+$', 'a' * 60 + '!')",
)
MEMORY = (
    "kept.append(bytearray({big}) * 40)",
    "while True: kept.append(bytearray(b'x') * (1 << 20))",
    "kept.append(mmap.mmap(-1, {big} * 100))",
    "kept.append([[] for _ in range({many} * 1000)])",
    "[alone(lambda: (kept.append(bytearray(b'x') * (64 << 20)), time.sleep(60))) for _ in range({few})]",
    "kept.append(' ' * (1 << 62))",
    "[kept.append(os.open('/dev/null', os.O_RDONLY)) for _ in range({many})]",
    "[kept.append(os.pipe()) for _ in range({many})]",
    "libc.mlockall(3)",
)
OUTPUT = (
    "while True: print('x' * 65536)",
    "sys.stdout.buffer.write(bytes(range(256)) * {many}); sys.stdout.flush()",
    "while True: sys.stderr.write('\\x1b[2J\\0' * 4096)",
    "print('\\ud800', '\\0', '\\x1b[2J')",
    "os.close(1); os.close(2)",
    "os.dup2(2, 1); print('x')",
    "print('x' * {big})",
    "open('/dev/stdout', 'w').write('x'); open('/dev/tty', 'w').write('x')",
    "print('proof 0 1'); print('{{\"same\": true}}')",
    "daemon(lambda: [print('y' * 4096, flush=True) for _ in range(10 ** 6)])",
    "sys.stdin.read(); os.read(0, 10)",
)
WAYS = ("here", "here", "here", "alone", "daemon", "thread", "again")
FAMILIES = (FILES, OUTSIDE, PROCESSES, MEMORY, OUTPUT)


def program(random: Random) -> str:
    """Returns a program of a few fragments, each started in a random way."""
    lines = [PREAMBLE]
    for n in range(random.choice((1, 1, 2, 3, 6))):
        fragment = random.choice(random.choice(FAMILIES)).format(
            n=n,
            big=random.choice((1000, 2**20, 2**23, 2**25)),
            many=random.choice((10, 1000, 20_000)),
            few=random.choice((1, 3, 20)),
            signal=random.choice((1, 2, 9, 10, 14, 15, 17, 19, 34)),
        )
        lines += [f"def act{n}():", f"    {fragment}", f"safe(act{n}, {random.choice(WAYS)})"]
    return "\n".join(lines) + "\n"
