function showHeadline(run) {
  const place = run.module_of_peak ? ` of ${run.module_of_peak}` : ", outside of any module";
  const by = run.operator_of_peak ? `, by ${operatorName(run.operator_of_peak)}` : "";
  if (!isNumber(run.peak_bytes)) {
    byId("headline").textContent = `No peak is known: ${run.note}`;
    return;
  }
  const number = sized(run.peak_bytes);
  number.id = "peak-number";
  byId("headline").append(number, make("span", {
    text: `at the peak, in the ${run.phase_of_peak}${place}${by}; event ${exact(run.peak_event)}.` }));
}

function showOther(run, other) {
  if (!isNumber(run.peak_bytes) || !isNumber(other.peak_bytes)) return;
  byId("other-peak").append(`${other.label}: `, sized(other.peak_bytes), ", ",
    sized(other.peak_bytes - run.peak_bytes, signed(other.peak_bytes - run.peak_bytes)), ` against ${run.label}`);
  byId("other-peak").hidden = false;
}

function showFacts(run) {
  const mesh = Object.entries(run.mesh || {}).map(([name, number]) => `${name} ${number}`).join(" \u00d7 ");
  const facts = [
    ["stays between steps", run.resident_bytes, sized], ["a step adds at most", run.step_peak_bytes, sized],
    ["saved by the first forward for its backward", run.saved_by_forward_bytes, sized],
    ["most saved for backward", run.saved_bytes, sized], ["parameters of the model", run.parameters, exact],
    ["trained in", run.trained_in, String], ["ranks", run.ranks, (number) => (mesh ? `${number}: ${mesh}` : `${number}`)],
    ["microbatches", run.micro_batches, exact],
  ];
  byId("facts").append(...facts.filter(([, value]) => value !== undefined && value !== null)
    .map(([label, value, show]) => make("div", {}, make("dt", { text: label }), make("dd", {}, show(value)))));
}

function showNotes(runs) {
  const notes = runs.flatMap((run) => [...(run.notes || []), ...(run.assumptions || []), run.note || "",
    run.reads_answered_by_1 ? `${plural(run.reads_answered_by_1, "number")} that the step reads back answered by 1` : "",
  ].filter(Boolean).map((note) => (runs.length > 1 ? `${run.label}: ${note}` : note)));
  byId("notes").append(...notes.map((text) => make("li", { text })));
  byId("notes").hidden = !notes.length;
}

function showTimelines(runs, colors) {
  const drawn = runs.filter((run) => run.timeline);
  if (!drawn.length) return;
  const highest = Math.max(...drawn.map((run) => run.peak_bytes)) || 1;
  const events = drawn.some((run) => run.timeline.number > run.timeline.events.length)
    ? " Of neighbouring events that share a column the one with the most bytes is shown; the peak is exact." : "";
  byId("timeline-about").textContent = "Every allocation, release, and start and end of being saved is an event."
    + `${events}${drawn.length > 1 ? " Both plots have one scale of bytes; each is as wide as its own step." : ""}`
    + " Point at the plot, or move with the arrow keys; P goes to the peak.";
  byId("timeline-plots").append(
    ...drawn.map((run) => new Timeline(run, colors, highest, drawn.length > 1 ? 230 : 340).element), phaseKey(drawn));
  byId("timeline-legend").append(legend(drawn, colors));
  byId("timeline").hidden = false;
}

function showTensors(runs, colors) {
  const peaks = runs.filter((run) => run.at_peak.rows.length);
  if (peaks.length) {
    byId("peak").hidden = false;
    byId("peak-icicle").append(...ofRuns("peak-run", peaks, (run) => new Icicle(run, colors)));
    byId("peak-rows").append(...ofRuns("peak-rows-run", peaks,
      (run) => tensorTable("peak-rows", `Alive at the peak of ${run.label}`, run.at_peak, colors)));
  }
  const saved = runs.filter((run) => run.saved_for_backward.rows.length);
  if (saved.length) {
    byId("saved").hidden = false;
    byId("saved-about").textContent = "What autograd or a checkpoint saves, when that is most"
      + `${isNumber(saved[0].saved_event) ? ` (event ${exact(saved[0].saved_event)})` : ""}. Parameters and inputs are`
      + " in the table, but would be there anyway.";
    byId("saved-rows").append(...ofRuns("saved-run", saved,
      (run) => tensorTable("saved", `Saved for backward of ${run.label}`, run.saved_for_backward, colors)));
  }
}

function main() {
  const { runs, colors, comparison, advice, measured } = JSON.parse(byId("data").textContent);
  showHeadline(runs[0]);
  showFacts(runs[0]);
  showNotes(runs);
  showTimelines(runs, colors);
  if (runs.length > 1) {
    byId("compare").hidden = false;
    showOther(...runs);
    showComparison(runs, comparison, colors);
  }
  if (advice) {
    byId("advice").hidden = false;
    showAdvice(advice);
  }
  if (measured) {
    byId("measured").hidden = false;
    showMeasured(runs[0], measured, colors);
  }
  showTensors(runs, colors);
  showContents();
  window.addEventListener("beforeprint", () => (byId("peak-details").open = true));
}

main();
