"""`quaver doctor [--model RUN|HF-FOLDER] [--gpu NAME]`: what float8 brings this machine, a model or a GPU.

`main` parses --json and --no-compile by hand, so that they work without pydantic, which `DoctorOptions` needs and only
the extra `quaver[train]` installs.
"""

from dataclasses import asdict

from quaver.lab.cli.doctor_machine import print_machine


def main(argv: list[str]) -> int:
    """Run the verb; returns 0 when done, 1 if a recipe fails on a device of this machine, 2 for bad input."""
    if set(argv) <= {"--json", "--no-compile"}:
        return print_machine(as_json="--json" in argv, try_compile="--no-compile" not in argv)
    from quaver.lab.cli import doctor_gpu, doctor_model
    from quaver.lab.cli.doctor_options import DoctorOptions
    from quaver.lab.cli.errors import report_bad_input
    from quaver.lab.settings.flags import parse_options
    from quaver.lab.terminal.console import print_views_or_json

    with report_bad_input():
        options = parse_options(DoctorOptions, argv, prog="quaver doctor")
        if options.gpu is not None:
            findings = doctor_gpu.describe(options, options.gpu)
            views, content = doctor_gpu.iter_views(findings), asdict(findings)
        elif options.model is not None:
            survey = doctor_model.survey_and_write(options, options.model)
            views, content = doctor_model.iter_views(survey, options.output), survey.to_dict()
    if options.gpu is None and options.model is None:
        return print_machine(as_json=options.json, try_compile=options.compile)
    print_views_or_json(views, content, as_json=options.json)
    return 0
