"""Figures and headline numbers of the report as a TensorBoard run. Writes TensorBoard's own records: no torch.

TensorBoard shows one picture per tag, with its caption, and one point per number; the tags of a run of records begin
with its name, so that they stand together.
"""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.record_writer import RecordWriter

from dcd_core.config import make_folder
from dcd_core.files import atomic_path
from diagnostics.sections.runs import Picture, Section

SUFFIX = ".report"  # of the files written here: others in the folder, of a training run say, are left alone
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # of a PNG, by its colour type


def write_board(folder: Path, sections: list[Section]) -> Path:
    """Write one event file with every picture and scalar of the sections; it replaces that of an earlier report.

    Returns the file. Raises UserError if the folder cannot be made.
    """
    earlier = list(make_folder(folder).glob(f"events.out.tfevents.*{SUFFIX}"))
    # a new name each time: in a file that it knows, TensorBoard reads on from where it stopped
    path = folder / f"events.out.tfevents.{time.time_ns()}{SUFFIX}"
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        writer = RecordWriter(handle)
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        for value in (value for section in sections for value in _values(section)):
            event = Event(wall_time=time.time(), step=0, summary=Summary(value=[value]))
            writer.write(event.SerializeToString())
    for old in earlier:
        old.unlink(missing_ok=True)
    return path


def picture_tag(section: Section, picture: Picture) -> str:
    """What TensorBoard calls a picture: "demo-signal/headroom"."""
    return f"{section.name}/{picture.path.stem.removeprefix(f'{section.name}-')}"


def _values(section: Section) -> list:
    found = [_image(picture_tag(section, picture), picture) for picture in section.pictures]
    found += [Summary.Value(tag=f"{section.name}/{tag}", simple_value=value) for tag, value in section.scalars.items()]
    return found


def _image(tag: str, picture: Picture) -> Summary.Value:
    """The PNG as it is, with its caption beneath."""
    data = picture.path.read_bytes()
    width, height = picture.size
    image = Summary.Image(height=height, width=width, colorspace=CHANNELS[data[25]], encoded_image_string=data)
    return Summary.Value(tag=tag, image=image, metadata=SummaryMetadata(summary_description=picture.caption))
