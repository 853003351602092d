"""What the host and disk tiers hold, how full they are, and what they did (contract: M7).

Bookkeeping of one engine, in bytes of one rank: every rank holds as much. `tiers.py` decides when
something moves; nothing here knows of orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flare_ray.contracts.tiers import Tier
from flare_ray.controller.paging.chain import Key, Trace
from flare_ray.controller.paging.regions import Regions, region_size
from flare_ray.controller.paging.worth import Prefix, PrefixMap
from flare_ray.errors import ContractViolation


@dataclass(slots=True)
class TierCounts:
    """Totals of one tier since the engine's start; bytes are those of one rank.

    Attributes:
        corrupt: files that were missing, damaged or foreign.
    """

    saved_tokens: int = 0
    saved_bytes: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    evicted_tokens: int = 0
    evicted_bytes: int = 0
    corrupt: int = 0


@dataclass(slots=True, eq=False)
class KeptPrefix(Prefix):
    """One prefix below the device tier.

    Attributes:
        entry: its id; names its content on every rank.
        num_bytes: of its host region.
        offset: first byte of that region; -1 = it has none.
        in_host: the region is filled on every rank.
        name: stem of its files; "" = it has none.
        on_disk: the files are whole on every rank, and the manifest is written.
        part_bytes: of one rank's part; file_bytes: counted, the manifest and what it may still grow
            to included.
        checksums: of each rank's file.
        busy: orders under way that read or write it; it is not evicted meanwhile.
        doomed: removed while busy; forgotten with the last of them.
        unplaced: when a request wanted it last, the device had no room for it.
    """

    entry: int = 0
    num_bytes: int = 0
    offset: int = -1
    in_host: bool = False
    name: str = ""
    on_disk: bool = False
    part_bytes: int = 0
    file_bytes: int = 0
    checksums: tuple[str, ...] = ()
    busy: int = 0
    doomed: bool = False
    unplaced: bool = False


class TierBook:
    """Host and disk tier of one engine.

    Args:
        host_bytes: arena of a rank; 0 = there is no host tier.
        disk_bytes: most bytes of one rank's files; 0 = there is no disk tier.
    Attributes:
        counts: by tier.
        deletions: files to delete, named by what evicted or dropped them; taken by `tiers.py`.
    """

    def __init__(self, host_bytes: int, disk_bytes: int) -> None:
        self.regions = Regions(host_bytes)
        self.disk_limit = disk_bytes
        self.disk_bytes = 0
        self.counts = {tier: TierCounts() for tier in (Tier.HOST, Tier.DISK)}
        self.deletions: list[KeptPrefix] = []
        # Findable prefixes by tier: asked for in every iteration.
        self._held = dict.fromkeys((Tier.HOST, Tier.DISK), 0)
        self._map: PrefixMap[KeptPrefix] = PrefixMap()
        self._doomed: set[KeptPrefix] = set()
        self._now = 0
        self._next_entry = 1

    def __iter__(self) -> Iterator[KeptPrefix]:
        """Findable prefixes, those that are being filled included."""
        return iter(self._map)

    def get(self, key: Key) -> KeptPrefix | None:
        """The prefix of exactly that key."""
        return self._map.get(key)

    def find(self, trace: Trace, limit: int) -> KeptPrefix | None:
        """The longest prefix of a trace, `limit` tokens at most, that can be restored."""
        while True:
            found = self._map.find(trace, limit)
            if found is None or found.in_host or found.on_disk:
                return found
            limit = found.tokens - 1

    def held(self, tier: Tier) -> tuple[int, int]:
        """(prefixes, bytes) of a tier."""
        if tier is Tier.HOST:
            return self._held[tier], self.regions.total_bytes - self.regions.free_bytes
        return self._held[tier], self.disk_bytes

    def used(self, kept: KeptPrefix, *, hit: bool) -> None:
        """The prefix was restored (`hit`), or is in use in the device tier."""
        self._now += 1
        kept.used = self._now
        if hit:
            kept.count_hit()

    def new(self, trace: Trace, tokens: int, *, hits: int = 0) -> KeptPrefix:
        """A prefix that is not kept yet; it has to be given a place and then `add`ed."""
        self._now += 1
        kept = KeptPrefix(trace, tokens, used=self._now, hits=hits, entry=self._next_entry)
        self._next_entry += 1
        self._map.offer(kept)
        return kept

    def add(self, kept: KeptPrefix) -> None:
        """Put a prefix that has a place into the map."""
        self._map.add(kept)

    def filled(self, kept: KeptPrefix) -> None:
        """A prefix's region holds it on every rank."""
        kept.in_host = True
        self._held[Tier.HOST] += 1

    def written(self, kept: KeptPrefix) -> None:
        """A prefix's files and its manifest are whole."""
        kept.on_disk = True
        self._held[Tier.DISK] += 1

    # Places.

    def host_place(self, kept: KeptPrefix, num_bytes: int, *, wanted: bool) -> bool:
        """Give a prefix a region of the host arena, whose content is not valid yet.

        Args:
            wanted: a request waits for it: it displaces whatever is worth least, not only what is
                worth less than itself.
        """
        limit = float("inf") if wanted else kept.worth(region_size(num_bytes), self._now)
        victims: list[KeptPrefix] = []
        others = sorted(
            (k for k in self if k.in_host and not k.busy and k is not kept), key=self._host_worth
        )
        given: list[tuple[int, int]] = []
        while not self.regions.fits_with(num_bytes, given):
            place = len(victims)
            if place == len(others) or self._host_worth(others[place]) >= limit:
                return False
            victims.append(others[place])
            given.append((others[place].offset, others[place].num_bytes))
        for victim in victims:
            self._count_eviction(Tier.HOST, victim, victim.num_bytes)
            self.drop_host(victim)
        offset = self.regions.take(num_bytes)
        assert offset is not None
        kept.offset, kept.num_bytes = offset, num_bytes
        return True

    def disk_place(self, kept: KeptPrefix, file_bytes: int) -> bool:
        """Count a file of a prefix against the tier's limit; False = what is there is worth more,
        or the file alone is larger than the limit."""
        limit = kept.worth(file_bytes, self._now)
        others = sorted((k for k in self if k.on_disk and not k.busy), key=self._disk_worth)
        victims: list[KeptPrefix] = []
        freed = 0
        while self.disk_bytes + file_bytes - freed > self.disk_limit:
            place = len(victims)
            if place == len(others) or self._disk_worth(others[place]) >= limit:
                return False
            victims.append(others[place])
            freed += others[place].file_bytes
        for victim in victims:
            self._count_eviction(Tier.DISK, victim, victim.file_bytes)
            self.drop_disk(victim)
        kept.file_bytes = file_bytes
        self.disk_bytes += file_bytes
        return True

    def resize_file(self, kept: KeptPrefix, num_bytes: int) -> None:
        """The files of a prefix turned out to have `num_bytes`."""
        self.disk_bytes += num_bytes - kept.file_bytes
        kept.file_bytes = num_bytes

    def drop_host(self, kept: KeptPrefix) -> None:
        """Take a prefix's region back."""
        if kept.offset >= 0:
            self.regions.give(kept.offset, kept.num_bytes)
        self._held[Tier.HOST] -= kept.in_host and not kept.doomed
        kept.offset, kept.in_host = -1, False
        self._forget_if_nowhere(kept)

    def drop_disk(self, kept: KeptPrefix) -> None:
        """Have a prefix's files deleted."""
        if kept.name:
            self.disk_bytes -= kept.file_bytes
            self.deletions.append(
                KeptPrefix(kept.trace, kept.tokens, entry=kept.entry, name=kept.name)
            )
        self._held[Tier.DISK] -= kept.on_disk and not kept.doomed
        kept.name, kept.on_disk, kept.file_bytes, kept.checksums = "", False, 0, ()
        self._forget_if_nowhere(kept)

    def release(self, kept: KeptPrefix) -> None:
        """An order on the prefix is done."""
        kept.busy -= 1
        if kept.doomed and not kept.busy:
            self._doomed.discard(kept)
            self.drop_host(kept)
            self.drop_disk(kept)

    def clear(self, tier: Tier) -> int:
        """Forget everything of a tier, without counting it as evicted; how many prefixes.

        What an order is working on leaves both tiers: nobody finds it, and its place is taken back
        when the order is done.
        """
        dropped = 0
        for kept in list(self):
            if not (kept.in_host if tier is Tier.HOST else kept.on_disk) and not kept.busy:
                continue
            dropped += 1
            if kept.busy:
                self._held[Tier.HOST] -= kept.in_host
                self._held[Tier.DISK] -= kept.on_disk
                kept.doomed = True
                self._doomed.add(kept)
                self._map.remove(kept)
            elif tier is Tier.HOST:
                self.drop_host(kept)
            else:
                self.drop_disk(kept)
        return dropped

    def check_integrity(self) -> None:
        """Recount bytes.

        Raises:
            ContractViolation: a region is lost or shared, or the sum of files is off.
        """
        held = [kept for kept in (*self, *self._doomed) if kept.offset >= 0]
        regions = [(kept.offset, region_size(kept.num_bytes)) for kept in held]
        regions = sorted([*regions, *self.regions.gaps])
        ends = [0, *(start + size for start, size in regions)]
        if [start for start, _ in regions] != ends[:-1] or ends[-1] != self.regions.total_bytes:
            raise ContractViolation(f"host tier: regions {regions} do not fill the arena")
        files = sum(kept.file_bytes for kept in (*self, *self._doomed))
        if files != self.disk_bytes or (self.disk_limit and files > self.disk_limit):
            raise ContractViolation(
                f"disk tier: {self.disk_bytes} bytes by count, {files} by file, at most "
                f"{self.disk_limit}"
            )
        found = {
            Tier.HOST: sum(kept.in_host for kept in self),
            Tier.DISK: sum(kept.on_disk for kept in self),
        }
        if found != self._held:
            raise ContractViolation(f"prefixes by tier: {self._held} by count, {found} by prefix")
        if any(kept.offset < 0 and not kept.name for kept in self):
            raise ContractViolation("a prefix is kept that lies nowhere")

    def _host_worth(self, kept: KeptPrefix) -> float:
        return kept.worth(region_size(kept.num_bytes), self._now)

    def _disk_worth(self, kept: KeptPrefix) -> float:
        return kept.worth(kept.file_bytes, self._now)

    def _count_eviction(self, tier: Tier, kept: KeptPrefix, num_bytes: int) -> None:
        counts = self.counts[tier]
        counts.evicted_tokens += kept.tokens
        counts.evicted_bytes += num_bytes

    def _forget_if_nowhere(self, kept: KeptPrefix) -> None:
        if kept.offset < 0 and not kept.name and self._map.get(kept.key) is kept:
            self._map.remove(kept)
