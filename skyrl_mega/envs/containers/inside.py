"""A shell script that runs a program in a remote container: bounded in time and output, and without leftovers.

A network can lose a client, half of an output, or the end of a program. So the container itself enforces the time
limit, the output limit and the end of all processes, and a reply shows that it is complete.
"""

from __future__ import annotations

import binascii
import math
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skyrl_mega.envs.containers.runtime import CommandOutput

KILL_ALL = "kill -9 -1"
"""Shell command that kills all processes of a PID namespace except process 1 and the shell."""
PIECE = 8 * 2**20
"""Maximum bytes of a file in a single reply as text."""

_KILL_OTHERS = r"""
facts() {  # facts PID: sets state, parent and id of a process, whose name may contain anything
    line=
    while IFS= read -r part || [ -n "$part" ]; do line="$line $part"; done <"/proc/$1/stat" || return 1
    id=$1
    set -- ${line##*) }
    [ $# -ge 20 ] || return 1
    state=$1 parent=$2 id=$id:${20}
}
others() {  # others SIGNAL: signals all processes that are neither spared nor in `signalled`
    found=
    for entry in /proc/[0-9]*; do
        facts "${entry#/proc/}" || continue
        case "$state $spared $signalled" in Z*|X*|*" $id "*) continue ;; esac
        kill "-$1" "${id%:*}" && found=yes
        [ "$1" = KILL ] || signalled="$signalled$id "
    done
    [ -n "$found" ]
}
kill_others() {  # stops all processes, so that none starts another, and then kills them
    process=$$
    while [ "$process" -gt 0 ] && facts "$process"; do spared="$spared $id " process=$parent; done
    for signal in STOP KILL; do
        signalled=' ' rounds=0
        while others $signal && [ $rounds -lt 100 ]; do
            rounds=$((rounds + 1))
            [ $signal = STOP ] || [ $rounds -lt 10 ] || sleep 0.05
        done
    done
    [ $rounds -lt 100 ]
}
"""
"""Functions that kill all processes except process 1, the shell, its ancestors, and those in `spared`."""

FIRST = rf"""
{_KILL_OTHERS}
for tool in mkdir rm stat head tail cat base64 sleep env; do
    command -v $tool >/dev/null || {{ echo "the image has no $tool"; exit 1; }}
done
mkdir -p "${{1%/*}}"
mkdir "$1" || {{ echo "the container has served a trajectory before, or $1 cannot be made"; exit 1; }}
spared=' '
for entry in /proc/[0-9]*; do facts "${{entry#/proc/}}" && spared="$spared$id "; done
echo "$spared"
"""
"""Script that prints the processes of a new container, or what is missing. The argument, a folder, marks the container
as used."""

CLEAN = rf"""
spared=$1
exec 2>/dev/null
{_KILL_OTHERS}
kill_others
"""
"""Script that kills all processes except those in its argument."""

_RUN = rf"""
folder=$1 ticks=$2 limit=$3 size=$4 form=$5 spared=$6 place=$7 why=
shift 7
exec 3>&1 2>/dev/null
[ $form = plain ] || exec 3>&-
{_KILL_OTHERS}
if [ $form = base64 ]; then
    mkdir -p "$folder"
    if [ "$size" = 0 ]; then : >"$folder/in"; else cat "$folder"/part.* | base64 -d >"$folder/in"; fi
    rm -f "$folder"/part.*
fi
if [ "$(stat -c %s "$folder/in")" != "$size" ]; then
    rm -rf "$folder"
    echo "${{folder##*/}} 1 full 0 0"
    exit
fi
read -r now rest </proc/uptime
end=$((${{now%.*}}${{now#*.}} + ticks))
(
    beat=0
    while [ -d "$folder" ]; do
        sleep 0.1
        kill -0 $$ || why=ended  # the shell was killed: its output must not stay open
        read -r now rest </proc/uptime
        [ "${{now%.*}}${{now#*.}}" -lt $end ] || why=timeout
        for file in out err; do [ "$(stat -c %s "$folder/$file")" -gt "$limit" ] && why=output; done
        if [ -n "$why" ]; then
            echo $why >"$folder/why"
            read -r main <"$folder/main" && kill -9 "$main" && exit  # else it has not yet started
        fi
        beat=$((beat + 1))
        [ $form != plain ] || [ $((beat % 100)) -gt 0 ] || printf . >&3  # keeps a quiet connection open
    done
) </dev/null >/dev/null &
watch=$!
(
    [ -z "$place" ] || cd "$place" || exit 126
    exec sh -c 'echo $$ >"$0/main"; exec 3>&- "$@"' "$folder" "$@"
) <"$folder/in" >"$folder/out" 2>"$folder/err"
code=$? why=ended
[ ! -e "$folder/why" ] || read -r why <"$folder/why"
kill -9 $watch
if [ -n "$spared" ]; then kill_others || why=left; else {KILL_ALL}; fi
out=$(stat -c %s "$folder/out") err=$(stat -c %s "$folder/err") keep=
echo "${{folder##*/}} $code $why $out $err"
if [ $form = plain ]; then
    head -c "$limit" "$folder/out"; head -c "$limit" "$folder/err"
    printf %s "${{folder##*/}}"
else
    if [ "$limit" -gt {PIECE} ]; then
        limit={PIECE}
        [ "$out" -le $limit ] && [ "$err" -le $limit ] || keep=yes
    fi
    head -c "$limit" "$folder/out" | base64; echo =; head -c "$limit" "$folder/err" | base64
fi
[ -n "$keep" ] || rm -rf "$folder"
"""
_UNPACK = """
exec 2>/dev/null
why=
(umask 077; mkdir -p "$0")
cat >"$0/all" || why=full
if [ -n "$why" ] || [ "$(stat -c %s "$0/all")" != "$2" ]; then rm -rf "$0"; echo "${0##*/} 1 ${why:-lost} 0 0"; exit; fi
head -c "$1" "$0/all" >"$0/run"
tail -c "+$(($1 + 1))" "$0/all" >"$0/in"
rm "$0/all"
exec sh "$0/run"
"""
"""Script that reads `_RUN` and a program's input from standard input. Its arguments are small and without secrets,
because they stand in process lists, in the address of a request and in its logs."""
READ = 'tail -c "+$2" "$1" | head -c "$3" | base64'
"""Script that prints a part of a file as text. Arguments: file, first byte (counted from 1), number of bytes."""


class BrokenReply(Exception):
    """A reply that is incomplete, or of another form."""


@dataclass(frozen=True)
class RemoteCall:
    """A program to run in a container, and the words of the command that runs the program there.

    Args:
        argv: Program and arguments.
        timeout_s: Time limit in seconds.
        limit: Maximum size of each output in bytes.
        size: Size of standard input in bytes.
        place: Working folder; None for the image's own.
        variables: Further environment variables.
        spared: Processes that are not killed at the end of the call, as printed by `FIRST`; "" kills all but process 1.
        text: True to transfer standard input and the outputs as base64 text, standard input in files (`part_path`).
            False to transfer bytes (`packed`).
    """

    argv: Sequence[str]
    timeout_s: float
    limit: int
    size: int = 0
    place: str | None = None
    variables: Mapping[str, str] | None = None
    spared: str = ""
    text: bool = False
    folder: str = field(default_factory=lambda: f"/tmp/.skyrl-mega-{secrets.token_hex(8)}")
    """Folder in the container for input and output, with a name that no other call has."""

    def words(self) -> list[str]:
        """Returns program and arguments of a command that runs `argv` in the container and prints a reply (`reply`)."""
        return ["sh", "-c", _RUN, "run", *self._settings()]

    def packed(self, stdin: bytes) -> tuple[list[str], bytes]:
        """Returns another form of `words`, for `text` False: a short program, and its standard input, which ends with
        `stdin`."""
        script = f"set -- {shlex.join(self._settings())}\n{_RUN}".encode(errors="surrogateescape")
        sizes = [str(len(script)), str(len(script) + len(stdin))]
        return ["sh", "-c", _UNPACK, self.folder, *sizes], script + stdin

    def _settings(self) -> list[str]:
        form = "base64" if self.text else "plain"
        ticks = math.ceil(self.timeout_s * 100)
        settings = (self.folder, ticks, self.limit, self.size, form, self.spared, self.place or "")
        variables = [f"{name}={value}" for name, value in (self.variables or {}).items()]
        return [*map(str, settings), *(["env", *variables] if variables else []), *self.argv]

    def part_path(self, number: int) -> str:
        """Returns the path, in the container, of a part of standard input, in base64; parts are joined in the order of
        their numbers."""
        return f"{self.folder}/part.{number:06d}"

    def reply(self, data: bytes) -> RemoteReply:
        """Returns the reply in `data`, the standard output of the command from `words` or `packed`.

        Raises:
            BrokenReply: The reply is incomplete, or of another form.
        """
        marker = self.folder.rpartition("/")[2].encode()
        _, found, rest = data.partition(marker + b" ")
        header, _, body = rest.partition(b"\n")
        fields = header.split()
        if not found or len(fields) != 4 or not all(f.isdigit() and len(f) < 16 for f in (fields[0], *fields[2:])):
            raise BrokenReply("there is no result")
        code, sizes, why = int(fields[0]), [int(size) for size in fields[2:]], fields[1].decode(errors="replace")
        if why == "ended" and max(sizes) > self.limit:  # ended before a look at the sizes
            why = "output"
        out, err = (min(size, self.limit) for size in sizes)
        if why in ("lost", "full"):
            return RemoteReply(code, why, 0, 0, b"", b"")
        if self.text:
            parts = body.split(b"=\n", 1) if body.startswith(b"=\n") else body.split(b"\n=\n", 1)
            stdout, stderr = decoded(parts[0]), decoded(parts[-1] if len(parts) == 2 else b"!")
            whole = len(stdout) == min(out, PIECE) and len(stderr) == min(err, PIECE)
        else:
            stdout, stderr, whole = body[:out], body[out : out + err], body[out + err :] == marker
        if not whole:
            raise BrokenReply("the outputs are incomplete")
        return RemoteReply(code, why, out, err, stdout, stderr)


@dataclass(frozen=True)
class RemoteReply:
    """The end of a program, and its outputs or their first parts."""

    code: int
    """Exit code, or 128 plus the number of the signal."""
    why: str
    """Cause of the end: `ended` (by itself), `timeout`, `output`, `full` (no space for the input), `lost` (the input
    is incomplete), `left` (a process cannot be killed)."""
    stdout_size: int
    stderr_size: int
    """Sizes of the outputs, at most the limit, in bytes."""
    stdout: bytes
    stderr: bytes
    """The outputs; as text at most the first `PIECE` bytes of each."""

    def output(self, stdout: bytes, stderr: bytes) -> CommandOutput:
        """Returns the result of `Container.run`: status `timeout`, `output`, `failed` or `ok`. A call with too little
        space for the input is `failed`, with an explanation instead of `stderr`.

        Args:
            stdout: The whole standard output.
            stderr: The whole standard error.
        """
        if self.why in ("timeout", "output"):
            return CommandOutput(self.why, None, stdout, stderr)
        if self.why == "full":
            stderr = b"no space for the standard input"
        return CommandOutput("failed" if self.code else "ok", self.code, stdout, stderr)


def decoded(text: bytes) -> bytes:
    """Returns the bytes of a base64 text with line breaks; b"" for a text of white space only.

    Raises:
        BrokenReply: The text is no base64.
    """
    try:
        return binascii.a2b_base64(text.replace(b"\n", b""), strict_mode=True) if text.strip() else b""
    except binascii.Error as error:
        raise BrokenReply(f"an output is no base64: {error}") from error
