"""Shared by the check scripts: which files belong to the project, how a finding is printed, C without its comments.

A check is a program that prints `file:line: rule` for each finding and exits 1 if there was one. `--root DIR` makes it
look at another tree; tools/check/selftest uses that to show that each check can fail.
"""
import argparse
import os
import re
import subprocess
import sys


class Check:
    """Parses the arguments that all checks share and collects findings."""

    def __init__(self, name, description, arguments=None):
        parser = argparse.ArgumentParser(prog="tools/check/" + name, description=description)
        here = os.path.dirname(os.path.abspath(__file__))
        parser.add_argument("--root", default=os.path.dirname(os.path.dirname(here)), help="the source tree to look at")
        if arguments:
            arguments(parser)
        self.name = name
        self.options = parser.parse_args()
        self.root = os.path.abspath(self.options.root)
        self.findings = []
        self.looked_at = 0

    def find(self, path, line, rule):
        where = os.path.relpath(path, self.root) if os.path.isabs(path) else path
        self.findings.append(f"{where}:{line}: {rule}" if line else f"{where}: {rule}")

    def files(self, *suffixes):
        """Project files (relative paths) with one of these suffixes; all files without any. Files that git would add
        count too, so that a mistake is seen before the commit."""
        inside = subprocess.run(["git", "-C", self.root, "rev-parse", "--show-prefix"], capture_output=True, text=True)
        if inside.returncode == 0 and inside.stdout.strip() == "":
            listing = subprocess.run(["git", "-C", self.root, "ls-files", "-z", "-co", "--exclude-standard"],
                                     capture_output=True, text=True, check=True)
            names = [name for name in listing.stdout.split("\0") if name]
        else:
            names = []
            for folder, folders, plain in os.walk(self.root):
                folders[:] = [one for one in folders if one not in (".git", ".venv") and not one.startswith("build")]
                names += [os.path.relpath(os.path.join(folder, one), self.root) for one in plain]
        names = sorted(set(names))
        return [name for name in names if (not suffixes or name.endswith(suffixes))
                and os.path.isfile(os.path.join(self.root, name))]

    def read(self, path):
        self.looked_at += 1
        with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as file:
            return file.read()

    def close(self, what="files"):
        """Prints the findings and ends the program: 0 without findings, 1 with, 2 if nothing was looked at."""
        for finding in self.findings:
            print(finding)
        if self.looked_at == 0:
            print(f"{self.name}: looked at no {what}: is {self.root} a source tree?", file=sys.stderr)
            sys.exit(2)
        if self.findings:
            print(f"{self.name}: {len(self.findings)} findings", file=sys.stderr)
            sys.exit(1)
        print(f"{self.name}: {self.looked_at} {what}, nothing to say")
        sys.exit(0)

    def give_up(self, message):
        print(f"{self.name}: {message}", file=sys.stderr)
        sys.exit(2)


def c_code_only(text):
    """C with comments blanked, and strings emptied except in #include lines; every line keeps its number."""
    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return re.sub(r"[^\n]", " ", token)
        return token[0] + token[-1]
    pattern = r'//[^\n]*|/\*.*?\*/|^[ \t]*#[ \t]*include[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''

    def replace(match):
        return match.group(0) if match.group(0).lstrip().startswith("#") else blank(match)
    return re.sub(pattern, replace, text, flags=re.S | re.M)


def rooms(check):
    """The table of tools/check/rooms.txt: room -> (rooms it may include, third-party tokens, private headers, line number).
    Private headers, an optional third column, are those that only the room's own files include; they may show third-party
    headers to each other."""
    table = {}
    path = "tools/check/rooms.txt"
    for number, line in enumerate(check.read(path).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z][a-z-]*):([^|]*)\|([^|]*)(?:\|([^|]*))?", line)
        if not match:
            check.find(path, number, "expected 'room: rooms | third-party tokens', then perhaps '| private headers'")
            continue
        table[match.group(1)] = (match.group(2).split(), match.group(3).split(), (match.group(4) or "").split(), number)
    return table
