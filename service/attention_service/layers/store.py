"""The stored layers of a directory: read when a request names them, kept in memory, read again when their files change.

The two files of a layer may change at any time, one after the other. So a layer is what its JSON says only if the hash
of its tensors agrees with it; until then the version that was read before goes on to be used.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

from attention_service.errors import LayerUnavailable, UnknownLayer, quote
from attention_service.layers.files import describe, describe_layer, paths_of, read_layer
from attention_service.layers.layer import LAYER, Layer
from attention_service.layers.names import closest, is_name
from attention_service.layers.tensors import BadFile, Identity, identity_of
from attention_service.schemas.layers import StoredLayer

# Seconds within which files are not looked at again.
INTERVAL: Final = 1.0
# Seconds until files that have just changed are read again. Later than that, the next request reads them.
PAUSES: Final = (0.02, 0.1, 0.3)
# Nanoseconds in which a file may change and keep its time: then only reading tells.
UNSETTLED: Final = 2 * 10**9
FILE: Final = re.compile(r"(.+)\.json")
SETUP: Final = "set ATTENTION_LAYERS to a directory of layers, which `attention-service layers import` makes"

logger = logging.getLogger("attention")


@dataclass(eq=False)
class Slot:
    """What is known of a layer by its name.

    layer: the version in use; failure: why its files cannot be used, "" if they can
    seen: identities of the files that were read; checked: when they were looked at
    reserved: bytes that are kept as long as the layer is, beside its arrays
    """

    layer: Layer | None = None
    failure: str = ""
    seen: tuple[Identity | None, ...] | None = None
    checked: float = float("-inf")
    reserved: int = 0
    reading: Lock = field(default_factory=Lock)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.reserved + (0 if self.layer is None else self.layer.nbytes)

    def forget(self) -> None:
        """Release the layer. Requests that use it keep it until they end."""
        self.layer, self.seen, self.reserved, self.checked = None, None, 0, float("-inf")


class LayerStore:
    """The layers of a directory. Its methods may be called by several threads; those that read files say so.

    limit: bytes of all layers in memory; those that were not used for longest make room
    clock: seconds; pause: waits so many seconds
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._clock = clock
        self._pause = pause
        self._slots: OrderedDict[str, Slot] = OrderedDict()  # by last use
        self._lock = Lock()
        self._descriptions: dict[str, tuple[tuple[Identity | None, ...], StoredLayer]] = {}
        self._names: frozenset[str] = frozenset()
        self._listed = float("-inf")

    @property
    def nbytes(self) -> int:
        """Memory that all layers take."""
        return sum(slot.nbytes for slot in self._slots.values())

    def fresh(self, name: str) -> Layer | None:
        """A layer in memory whose files were looked at within a second; else None. Reads nothing."""
        slot = self._slots.get(name)
        if slot is None or slot.layer is None or self._clock() - slot.checked >= INTERVAL:
            return None
        with self._lock:
            self._touch(name)
        return slot.layer

    def last(self, name: str) -> Layer | None:
        """The version of a layer that is in memory, if any. Reads nothing."""
        slot = self._slots.get(name)
        return None if slot is None else slot.layer

    def get(self, name: str) -> Layer:
        """A layer, read if it is not in memory or its files have changed. Reads files.

        Errors: UnknownLayer; LayerUnavailable for files that are wrong, where no version of them is in memory.
        """
        paths = paths_of(self._folder, name) if is_name(name) else ()
        if not paths or identity_of(paths[0]) is None:
            with self._lock:
                self._slots.pop(name, None)
            raise self._unknown(name)
        with self._lock:
            slot = self._slots.setdefault(name, Slot())
        with slot.reading:
            if self._clock() - slot.checked >= INTERVAL:
                self._refresh(name, slot)
            layer, failure = slot.layer, slot.failure
        if layer is None:
            raise unavailable(name, failure)
        with self._lock:
            self._touch(name)
        return layer

    def names(self) -> frozenset[str]:
        """The names of all layers, at most a second old, or those of before if they cannot be read. Reads files."""
        if self._clock() - self._listed >= INTERVAL:
            try:
                found = (FILE.fullmatch(path.name) for path in self._folder.iterdir())
                self._names = frozenset(match[1] for match in found if match and is_name(match[1]))
            except OSError as error:
                logger.error("the directory of layers cannot be read, its last names are used: %s", error.strerror)
            self._listed = self._clock()
        return self._names

    def listed(self) -> frozenset[str] | None:
        """The names of all layers if the directory was read within a second, else None. Reads nothing."""
        return self._names if self._clock() - self._listed < INTERVAL else None

    def describe_all(self) -> list[StoredLayer]:
        """What all layers are, by name; of those that cannot be used, why. Reads files."""
        found, names = [], self.names()
        for name in self._descriptions.keys() - names:
            del self._descriptions[name]
        for name in sorted(names):
            try:
                found.append(self.describe(name))
            except LayerUnavailable as error:
                reason = error.faults[0].got
                found.append(StoredLayer(name=name, hash="", source="", options={}, tensors=[], nbytes=0, error=reason))
            except UnknownLayer:  # removed since
                continue
        return found

    def describe(self, name: str) -> StoredLayer:
        """What a layer is, without its numbers: the one that a request would get, as far as that is known unread.

        Reads its JSON and the header of its tensors. What only the numbers tell is known of a layer that was read.

        Errors: UnknownLayer, LayerUnavailable.
        """
        if not is_name(name):
            raise self._unknown(name)
        if self._failed(name):
            return describe_layer(self.get(name))  # reads again only what may have changed since
        try:
            return self._described(name)
        except FileNotFoundError as error:
            if Path(error.filename) == paths_of(self._folder, name)[0]:
                raise self._unknown(name) from None
            failure = "lacks its tensors"
        except OSError as error:
            failure = f"cannot be read: {error.strerror}"
        except BadFile as error:
            failure = str(error)
        layer = self.last(name)
        if layer is None:
            raise unavailable(name, failure)
        return describe_layer(layer)  # the version before goes on to be used

    def _described(self, name: str) -> StoredLayer:
        """What the files of a layer say, read unless they are those of before. Errors: FileNotFoundError, BadFile."""
        seen = self._identities(name)
        kept = self._descriptions.get(name)
        if kept is not None and kept[0] == seen:
            return kept[1]
        found = describe(self._folder, name, self._limit)
        if all(map(_is_settled, seen)):
            self._descriptions[name] = seen, found
        return found

    def _failed(self, name: str) -> bool:
        """True if the files of a layer were read and cannot be used, and are the same for all that is known."""
        slot = self._slots.get(name)
        if slot is not None and slot.failure:
            with suppress(OSError):
                return slot.seen in (None, self._identities(name))
        return False

    def _touch(self, name: str) -> None:
        if name in self._slots:
            self._slots.move_to_end(name)

    def _refresh(self, name: str, slot: Slot) -> None:
        """Look at the files of a layer, and read them if they are not those that were read."""
        try:
            if slot.seen is None or self._identities(name) != slot.seen:
                self._read(name, slot)
        except OSError as error:
            slot.failure = f"cannot be read: {error.strerror}"
        slot.checked = self._clock()

    def _read(self, name: str, slot: Slot) -> None:
        """Read a layer into its slot. After a failure the version before stays there."""
        room = partial(self._make_room, name)
        for wait in (*PAUSES, None):
            seen = self._identities(name)
            try:
                layer = read_layer(self._folder, name, self._limit, room, self.reserve)
            except FileNotFoundError:
                failure = "lacks one of its two files"
            except BadFile as error:
                failure = str(error)
            else:
                with self._lock:
                    slot.layer, slot.failure, slot.seen, slot.reserved = layer, "", seen, 0
                return
            settled = seen == self._identities(name) and all(_is_settled(identity) for identity in seen)
            if settled or wait is None:
                break
            self._pause(wait)
        if slot.layer is not None:
            logger.error(
                "layer %s cannot be read again, the version before goes on to be used, as it %s", name, failure
            )
        slot.failure, slot.seen = failure, seen if settled else None

    def _identities(self, name: str) -> tuple[Identity | None, ...]:
        """The identities of the files of a layer. Errors: OSError."""
        return tuple(map(identity_of, paths_of(self._folder, name)))

    def _make_room(self, name: str, size: int) -> bool:
        """Release layers until so many more bytes fit, those not used for longest first, but not this one."""
        with self._lock:
            for other, slot in list(self._slots.items()):
                if self.nbytes + size <= self._limit:
                    break
                if other != name and slot.layer is not None:
                    slot.forget()
            return self.nbytes + size <= self._limit

    def reserve(self, layer: Layer, size: int) -> bool:
        """Count so many more bytes as kept with a layer. False if there is no room, or another version is in use."""
        slot = self._slots.get(layer.name)
        if slot is None or slot.layer is not layer or not self._make_room(layer.name, size):
            return False
        with self._lock:
            slot.reserved += size
        return True

    def _unknown(self, name: str) -> UnknownLayer:
        known = self.names()
        if not known:
            return UnknownLayer.at(f"/{LAYER}", "the name of a layer, of which there are none", quote(name), SETUP)
        return UnknownLayer.at(f"/{LAYER}", f"the name of a layer, like {', '.join(closest(name, known))}", quote(name))


def unavailable(name: str, reason: str) -> LayerUnavailable:
    """The error for a layer whose files cannot be used. reason: in words"""
    expected = f"the files of layer {name} to be those of a layer"
    return LayerUnavailable.at(f"/{LAYER}", expected, f"one that {reason}", headers={"Retry-After": "1"})


def _is_settled(identity: Identity | None) -> bool:
    """False for a file that may have been changed since it was looked at without a change of its time."""
    return identity is None or abs(time.time_ns() - identity.modified) > UNSETTLED
