"""Predicts published runs, and quaver's configs on up to 100,000 GPUs, with `quaver plan`. Nothing is trained.

    python -m benchmarks.plan --published --update-docs    docs/experiments/published-runs.md; a minute
    python -m benchmarks.plan --published --memory         predicts their memory, too; half an hour
    python -m benchmarks.plan --scaling --update-docs      docs/experiments/scaling-curves.md and its picture; minutes
    python -m benchmarks.plan --calibrate                  the share of each gpu that fits its row

`--recorded` reads benchmarks/results/plan_{published,memory,scaling}.json. Without `--memory`, memory is always read.
All results are deterministic.
"""

from argparse import Namespace

from benchmarks.plan import memory, published, scaling
from benchmarks.record import make_page_parser, record_and_show


def main() -> None:
    parser = make_page_parser(__doc__)
    parser.add_argument("--published", action="store_true", help="simulate the published runs")
    parser.add_argument("--memory", action="store_true", help="with --published: predict memory, too")
    parser.add_argument("--scaling", action="store_true", help="simulate large clusters")
    parser.add_argument("--calibrate", action="store_true", help="print the share of each GPU that fits its row")
    options = parser.parse_args()
    if not (options.published or options.scaling or options.calibrate):
        parser.error("give --published, --scaling or --calibrate")
    if options.memory and not options.published:
        parser.error("--memory is for --published")
    if options.calibrate:
        for name, gpu in published.CALIBRATED_GPUS.items():
            print(f"{name:14s} {published.calibrate_share(name):.3f}  now {gpu.sustained_share}  {gpu.published_run}")
    for part in (published,) * options.published + (scaling,) * options.scaling:
        results = record_and_show(options, part.predict_all, part.RECORD, part.make_tables, part.PAGE)
        if options.update_docs:
            part.draw(results)
    if options.published:
        of_memory = Namespace(**{**vars(options), "recorded": options.recorded or not options.memory})
        record_and_show(of_memory, memory.predict_all, memory.RECORD, memory.make_tables, memory.PAGE)


if __name__ == "__main__":
    main()
