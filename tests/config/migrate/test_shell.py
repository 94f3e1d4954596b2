"""GivenSettings of shell scripts, compared with bash itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate import shell

PLAIN = {
    "variables": "A=1\nB='two words'\nrun x=$A y=\"$B\" z=${A}b",
    "unquoted values are split": 'A="--x 1  --y 2"\nrun $A "$A"',
    "quotes": """run 'a "b" $C' "d 'e'" f\\ g "h\\"i" ''""",
    "arithmetic": "A=1024\nB=$((A * 2))\nrun $B $((($B + 3) / 2)) $(( (A+B) % 7 ))",
    "defaults": 'A=${X1:-5}\n: "${X2:=six}"\nB=${X3:-"${A}/7"}\nrun $A $X2 $B ${A:-9} ${A:+yes}',
    "arrays": 'A=(\n  --x 1 # a comment\n  # --y 2\n  --z "3 4"\n)\nA+=(--w 5)\nrun ${A[@]} "${A[@]}"',
    "no words": 'A=()\nB=\nrun x $A ${A[@]} "${A[@]}" $B "$B" "$@" y',
    "continued lines": "run a \\\n  b \\\n  c # comment\n",
    "a line continued inside of a word": 'run a\\\nb "c\\\nd" $((1 + \\\n2)) \\\n  g#h',
    "a commented line that ends as if continued": "A=(\n  --x 1\n  # --y 4 \\\n  --z 8 \\\n)\nrun ${A[@]} # b \\\n: c",
    "a here-string": "cat > /dev/null <<< 'a b'\ncat <<<x > /dev/null\nrun right\n\n: later",
    "redirections": "run a 2 2>&1 | cat",
    "unset": 'A=1\nB=2\nunset A B\nrun x$A "${A:-3}" ${B-4} y${B+5}',
    "functions": (
        'only_eval() { run wrong; }\nfunction train {\n  local N=3\n  if [ "$1" = a ]; then B=$N; fi\n  shift\n'
        '  run "$@" $N$B ${2:-z}\n}\nmain()\n{\n  train a "x y" "$@"\n}\nN=1\nmain --b 2'
    ),
    "stars in a pattern": "A=xaaaaaab.b\nrun ${A%%*a*a*a*a*a*b} ${A%a*b} ${A##*a*b} ${A#*a*a}",
    "conditions": 'A=on\nif [ "$A" = "on" ]; then\n  B=1\nelif [ "$A" = off ]; then\n  B=2\nelse\n  B=3\nfi\nrun $B',
    "an inner condition": (
        "if [ 2 -gt 3 ]; then\n  if [ 1 = 1 ]; then B=1; fi\nelse\n  if [ ! -z x ]; then B=2; fi\nfi\nrun $B"
    ),
    "and, or": "[ 1 = 2 ] && A=1\n[ 1 = 1 ] && B=2\n[ 1 = 1 ] || C=3\nrun x$A y$B z$C",
    "cut text": "A=/models/Qwen3-8B.tar.gz\nrun ${A##*/} ${A%.*} ${A%%.*} ${A#/models/}",
    "commands with a known output": "run $(seq 3) $(seq 2 3 9) $(basename /a/b) $(dirname /a/b/) $(echo x y)",
    "a here-document": "cat > /dev/null <<EOF\nrun wrong\nEOF\nrun right",
    "export": "export A=3 B=4\nreadonly C=5\nrun $A$B$C",
    "text beside values": "A=x\nrun \"${A}_1\" $A.y 'it''s' data.files=\"['$A/train.parquet']\"",
}


@pytest.mark.parametrize("script", PLAIN.values(), ids=PLAIN)
def test_words_are_those_of_bash(script: str, tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    file.write_text(script + "\n")
    show = "run() { printf '%s\\n' \"$@\"; }\n"
    bash = subprocess.run(
        ["bash", "-c", show + script], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    [command] = [c for c in shell.read(file).commands if c[0].text == "run"]
    assert [word.text for word in command[1:]] == bash.stdout.splitlines()
    assert not any(word.unresolved for word in command)


@pytest.mark.parametrize(
    "changed",
    ["((N=16))", "((N++))", "let N=4", "let 'N += 4'", "read -r N <<< 4", "mapfile -t N < x", "printf -v N %s 4",
     "A=$((N=4))", "for N in 1 2; do :; done", "if touch x; then unset N; fi", "while read -r N; do :; done"],
)  # fmt: skip
def test_no_old_value_is_kept(changed: str, tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    file.write_text(f"N=8\n{changed}\nrun $N\n")
    [word] = [word for command in shell.read(file).commands for word in command if word.text == "$N"]
    assert word.unresolved.startswith("N is set ")


@pytest.mark.parametrize(
    "text",
    [
        "A=xx\n" + "A=$A$A\n" * 40 + "run $A",
        "A=(x x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + "run $A",
        "f() { g; g; g; g; }\ng() { f; f; f; f; }\nf",
        "source script.sh\n" * 9,
    ],
    ids=["text", "array", "functions", "source"],
)
def test_endless_scripts_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.sh").write_text(text)
    with pytest.raises(UserError, match="more than"):
        shell.read(Path("script.sh"))


def test_deep_expansions_are_unresolved(tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    file.write_text("run " + "${A:-" * 3000 + "}" * 3000)
    assert "deeper than 50 levels" in shell.read(file).commands[0][1].unresolved


def test_nothing_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    file = tmp_path / "script.sh"
    file.write_text(
        f"touch {marker}\nA=$(touch {marker})\nB=`touch {marker}`\nsource <(touch {marker})\n"
        f'if touch {marker}; then C=1; else C=2; fi\nrun x=$A y=$B z=$C w="$(touch {marker})"\n'
    )
    command = shell.read(file).commands[-1]
    assert not marker.exists()
    assert [word.text for word in command] == ["run", "x=$A", "y=$B", "z=$C", f'w="$(touch {marker})"']
    assert all("running shell" in w.unresolved for w in (command[1], command[2], command[4]))
    assert command[3].unresolved == "C is set in a loop or under a condition"


def test_the_environment_is_read_when_the_run_starts(tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    file.write_text('DATA=${DATA:-"$HOME/data"}\nrun a=$DATA/x.parquet n=$1\n')
    script = shell.read(file)
    [_, path, number] = script.commands[0]
    assert path.text == "a=${oc.env:HOME}/data/x.parquet"
    assert number.unresolved == "$1 is an argument of the script"
    assert script.variables.assumptions == [
        "the script's defaults hold, as if the environment lacked DATA",
        "read from the environment when the run starts: HOME",
    ]


def test_a_sourced_script_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text('LAYERS=2\nMODEL=(--layers $LAYERS --freq "$(python3 -c 1)")\n')
    file = tmp_path / "run.sh"
    file.write_text(
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "${HERE}/models/small.sh"\nsource "${HERE}/gone.sh"\nrun ${MODEL[@]}\n'
    )
    script = shell.read(file)
    assert [word.text for word in script.commands[-1]] == ["run", "--layers", "2", "--freq", '"$(python3 -c 1)"']
    assert "python3" in script.commands[-1][-1].unresolved
    assert script.variables.missing == {f"{tmp_path}/gone.sh"}


@pytest.mark.parametrize(
    "text", ["A=$((1", "run ${", "run 'a", 'run "a', "if then fi", "run $(", "))", "A=(", "<<", "\\"]
)
def test_broken_scripts_end(text: str, tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    file.write_text(text)
    shell.read(file)
