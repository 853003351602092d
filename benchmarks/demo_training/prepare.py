"""Packs the texts that training carries along, and trains the tokenizer. Runs on a CPU in about a
minute.

``python -m benchmarks.demo_training.prepare UNPACKED PACK``, where UNPACKED holds the unpacked
Debian packages ``wordnet-base`` and ``python3.11-doc`` and the manuals of ``prose.MANUALS``::

    apt-get download wordnet-base python3.11-doc postgresql-doc-15 python-django-doc \\
        python-sqlalchemy-doc sqlite3-doc
    for d in *.deb; do dpkg -x $d UNPACKED; done
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import textwrap
from pathlib import Path

from tokenizers import Tokenizer

from .corpus import load_corpus
from .family import FAMILIES, Family, family_of
from .prose import MANUALS, examples, manuals
from .vocabulary import save_tokenizer, train_tokenizer

NUM_GLOSSES = 30_000
PARTS = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}


def glosses(wordnet: Path) -> list[tuple[int, str, str, str]]:
    """(tagged count, part of speech, lemma, meaning) of single words, most tagged first.

    The meaning is that of the most frequent sense, without examples. Rank comes from the
    tagged-sense count of ``index.*``: the base package has no ``index.sense``.
    """
    meanings: dict[tuple[str, str], str] = {}
    for name in PARTS.values():
        for line in (wordnet / f"data.{name}").read_text("latin-1").split("\n"):
            if line and not line.startswith("  "):
                head, gloss = line.split("|", 1)
                fields = head.split()
                meanings[fields[2].replace("s", "a"), fields[0]] = gloss.strip()
    rows = []
    for part, name in PARTS.items():
        for line in (wordnet / f"index.{name}").read_text("latin-1").split("\n"):
            if not line or line.startswith("  "):
                continue
            fields = line.split()
            pointers = int(fields[3])
            tagged, offset = int(fields[5 + pointers]), fields[6 + pointers]
            meaning = _short(meanings[part, offset])
            if (
                re.fullmatch(r"[a-z]{2,14}", fields[0])
                and 8 <= len(meaning) <= 110
                and meaning.isascii()
            ):
                rows.append((tagged, part, fields[0], meaning))
    rows.sort(key=lambda row: (-row[0], row[1], row[2]))
    return rows[:NUM_GLOSSES]


def _short(gloss: str) -> str:
    first = gloss.split('; "')[0].split(";")[0].split(' "')[0]
    return re.sub(r"^\([^)]*\)\s*", "", first).strip().rstrip(":")


def documentation(html: Path) -> list[dict[str, str]]:
    """Distinct reStructuredText sources of the Python documentation, sorted by path; the key
    decides the split.
    """
    documents: list[dict[str, str]] = []
    seen = set()
    for path in sorted((html / "_sources").rglob("*.rst.txt")):
        text = path.read_text("utf-8", errors="ignore")
        digest = hashlib.sha1(text.encode()).digest()
        if digest not in seen and "/whatsnew/changelog" not in str(path) and len(text) > 400:
            seen.add(digest)
            documents.append({"key": f"doc{len(documents)}", "text": text})
    return documents


def notices(unpacked: Path) -> dict[str, str]:
    """Licence texts that travel with the weights, by file name, from the packages themselves."""
    header = (unpacked / "usr/share/wordnet/data.noun").read_text("latin-1").split("\n")
    wordnet = [re.sub(r"^  \d+ ?", "", t).rstrip() for t in header if t.startswith("  ")]
    source = unpacked / "usr/share/doc/python3.11/html/_sources/license.rst.txt"
    section = source.read_text("utf-8").split("PSF LICENSE AGREEMENT FOR PYTHON |release|", 1)[1]
    block = section.split(".. parsed-literal::", 1)[1].split("\n\n\n", 1)[0]
    psf = textwrap.dedent(block).strip().replace("|release|", "3.11")
    texts = {
        "WordNet-3.0.txt": "\n".join(wordnet).strip() + "\n",
        "PSF-2.0.txt": "PSF LICENSE AGREEMENT FOR PYTHON 3.11\n\n" + psf + "\n",
    }
    for package in MANUALS:
        copyright_file = unpacked / "usr/share/doc" / package / "copyright"
        texts[f"{package}.txt"] = copyright_file.read_text("utf-8")
    return texts


def prepare(unpacked: Path, pack: Path, family: Family, tokenizer: Path | None = None) -> None:
    """Write glosses, documentation, prose, licence texts and the tokenizer into ``pack``.

    Args:
        unpacked: folder with the unpacked Debian packages.
        pack: folder to write.
        family: whose added tokens and chat layout the tokenizer has.
        tokenizer: a ``tokenizer.json`` to keep, so that an edition's token ids stay those of the
            one before; None = train one.
    """
    pack.mkdir(parents=True, exist_ok=True)
    words = glosses(unpacked / "usr/share/wordnet")
    with lzma.open(pack / "wordnet.tsv.xz", "wt", preset=9, encoding="utf-8") as f:
        f.writelines("\t".join(map(str, row)) + "\n" for row in words)
    docs = documentation(unpacked / "usr/share/doc/python3.11/html")
    with lzma.open(pack / "docs.jsonl.xz", "wt", preset=9, encoding="utf-8") as f:
        f.writelines(json.dumps(d, ensure_ascii=False) + "\n" for d in docs)
    prose = list(manuals(unpacked))
    prose += [("wordnet-base", t) for t in examples(unpacked / "usr/share/wordnet", PARTS)]
    with lzma.open(pack / "prose.jsonl.xz", "wt", preset=9, encoding="utf-8") as f:
        f.writelines(
            json.dumps({"key": f"{package}-{i}", "text": text}, ensure_ascii=False) + "\n"
            for i, (package, text) in enumerate(prose)
        )
    for name, text in notices(unpacked).items():
        (pack / name).write_text(text, "utf-8")
    characters = sum(len(d["text"]) for d in docs)
    print(f"{len(words)} glosses, {len(docs)} documents, {characters / 1e6:.1f} M characters")
    print(f"{len(prose)} pages of prose, {sum(len(t) for _, t in prose) / 1e6:.1f} M characters")
    if tokenizer is not None:
        save_tokenizer(Tokenizer.from_file(str(tokenizer)), pack, family)
        return
    corpus = load_corpus(pack, "train", max_files=1500)
    save_tokenizer(train_tokenizer(corpus, family), pack, family)
    print(f"tokenizer trained; code by package {corpus.characters}")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="pack texts and train the tokenizer")
    parser.add_argument("unpacked", type=Path, help="folder with the unpacked Debian packages")
    parser.add_argument("pack", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to keep instead of training")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    args = parser.parse_args()
    prepare(args.unpacked, args.pack, family_of(args.family), args.tokenizer)


if __name__ == "__main__":
    main()
