"""State that lies beside a checkpoint becomes a part of it without being copied: its file gets a name there.

The kernel gives a file a name only between two writes to it, so that who asks waits for those under way. It is asked at
once where it is not known yet whether files of a tier can be named in a directory, and later by the thread that saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlpo_hpc.cluster.node import Node, gather_on_node
from mlpo_hpc.cluster.verdict import gather, together
from mlpo_hpc.config import OffloadConfig
from mlpo_hpc.errors import StorageError, here
from mlpo_hpc.state.node_file import Means
from mlpo_hpc.storage.base import FileContainer
from mlpo_hpc.storage.generations import Generations
from mlpo_hpc.storage.place import Place
from mlpo_hpc.storage.tier import StorageTier


@dataclass(frozen=True)
class Succession:
    """How the file of a tier is followed by another.

    Parameters
    ----------
    number : int
        Of the tier in the configuration.
    tier : StorageTier or None
        None where this rank has no slots on it.
    of_node : bool
        Whether all ranks of a node have one file.
    open : callable
        Opens the next one: collective over the training world if it is of a node, this rank's alone otherwise.
    proven : set of Path
        Directories of checkpoints in which a file of this tier was named.
    """

    number: int
    tier: StorageTier | None
    of_node: bool
    open: Callable[[], FileContainer | None]
    proven: set[Path] = field(default_factory=set)


@dataclass(frozen=True)
class LinkedFile:
    """A file of a tier that is in a checkpoint as it is.

    Parameters
    ----------
    path : Path
        In the folder of the checkpoint.
    container : Generations
        Of the tier.
    generation : int
        Of the file.
    following : FileContainer
        Where the tier's state goes from now on.
    of_node : bool
        Whether other ranks may need it though this one does not.
    is_ours : bool
        Whether this rank gives it its name there, and takes it away if the checkpoint will not be.
    proven : set of Path
        See `Succession`.
    """

    path: Path
    container: Generations
    generation: int
    following: FileContainer
    of_node: bool
    is_ours: bool
    proven: set[Path]

    @property
    def sealed(self) -> FileContainer:
        """The file itself."""
        return self.container.member(self.generation)

    def give_name(self) -> None:
        """Name it there, if this rank is to and has not. From any thread.

        Raises
        ------
        StorageError
            If that cannot be.
        """
        if self.is_ours and not self.path.exists() and not self.sealed.transport.link(str(self.path)):
            self.proven.discard(self.path.parent.parent)  # the next save finds another way
            raise StorageError(f"a state file cannot be named there any more, as others before: {here(self.path)}")

    def undo(self) -> None:
        """There will be no checkpoint, and nothing was written to what follows."""
        self.following.close()
        if self.is_ours:
            with suppress(FileNotFoundError):
                self.path.unlink()


def can_follow(config: OffloadConfig, place: Place, means: Means) -> bool:
    """Whether a checkpoint may take the file of a tier as it is, so that another one follows."""
    if config.checkpoint.format != "mlpo_hpc" or config.checksum == "off" or place.tier.keep:
        return False
    return place.shared if means.container == "hdf5" else means.transport == "posix"


def link_files(
    successions: Sequence[Succession], node: Node, folder: Path, unique: str, failed: str
) -> dict[str, LinkedFile]:
    """Collective over the training world. Files of tiers that are to be in a folder, where that can be; by tier.

    Those that have no name there yet get it by `LinkedFile.give_name`.

    Parameters
    ----------
    successions : sequence of Succession
        The same tiers on all ranks.
    node : Node
        This rank's place.
    folder : Path
        Of the checkpoint.
    unique : str
        A part of the names.
    failed : str
        What cannot be done if this fails.

    Raises
    ------
    StorageError
        If a file that is to follow cannot be made.
    """
    found = [_follow(succession, node, folder, unique, failed) for succession in successions]
    return dict(filter(None, found))


def _follow(
    succession: Succession, node: Node, folder: Path, unique: str, failed: str
) -> tuple[str, LinkedFile] | None:
    """Collective over the training world."""
    names_it = not succession.of_node or node.node_rank == 0
    mine = together(lambda: _name(succession, node, folder, unique) if names_it else None, failed)
    path = gather_on_node(node, mine)[0] if succession.of_node else mine
    following = None
    if succession.of_node and any(gather(path is not None)):
        following = succession.open()
    elif not succession.of_node:
        following = together(lambda: succession.open() if path is not None else None, failed)
    tier = succession.tier
    if following is None or tier is None:
        return None
    if path is None:  # on another node it could be named
        following.close()
        return None
    assert isinstance(tier.container, Generations)
    last = tier.container.last
    return tier.name, LinkedFile(path, tier.container, last, following, succession.of_node, names_it, succession.proven)


def _name(succession: Succession, node: Node, folder: Path, unique: str) -> Path | None:
    """Its name, which it has now or can be given; None where that cannot be."""
    if succession.tier is None:
        return None
    container = succession.tier.container
    assert isinstance(container, Generations)
    ending = "h5" if succession.of_node else "bin"
    path = folder / f"sealed{succession.number}-{node.world_rank:05d}-{unique}.{ending}"
    if folder.parent not in succession.proven:
        if not container.member(container.last).transport.link(str(path)):
            return None
        succession.proven.add(folder.parent)
    return path
