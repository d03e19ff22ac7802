// The calculator of the site. Its formulas and data are in formulas.js, which is made from `stretto estimate`.

// Returns all rows of a job, and which of them is the first choice: the fastest that costs no more than is allowed, and
// of some alike the most exact, which comes first.
function calculate(job) {
  const rows = [];
  for (const row of ESTIMATE.rows) {
    const bill = row.bills[job.microBatches];
    if (bill === undefined) continue;
    const sent = sent_bytes(job.parameters, job.ranks, bill.bytes);
    const link = busy_seconds(sent, job.bitsPerSecond);
    const core = job.packs * of_rank(job.parameters, job.ranks, ...bill.core);
    const busy = Math.max(link, core);
    const onWire = row.element * job.parameters;
    const last = last_share(job.parameters, ESTIMATE.bucketBytes, onWire, job.ranks * ESTIMATE.messageBytes);
    let waiting = 0;
    for (const [share, hidden, times, inBuckets] of bill.parts) {
      waiting += times * waiting_seconds(job.computing, busy, share, hidden, inBuckets ? last : 0);
    }
    const known = row.nats.find(([mostRanks]) => job.ranks <= mostRanks);
    rows.push({
      strategy: row.strategy, wire: row.wire, sent, link, core, waiting, seconds: job.computing + waiting,
      memory: of_rank(job.parameters, job.ranks, bill.whole, bill.shared),
      nats: known === undefined ? null : known[1],
    });
  }
  const cheap = rows.filter((row) => row.nats !== null && row.nats <= job.allowed);
  const limit = ESTIMATE.alike * Math.min(...cheap.map((row) => row.seconds));
  return { rows, choice: rows.indexOf(cheap.find((row) => row.seconds <= limit)) };
}

function bytes(count) {
  const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  const [size, unit] = units.find(([least]) => count >= least) ?? units[3];
  return `${three(count / size)} ${unit}`;
}

function three(value) {
  return String(Number(value.toPrecision(3)));
}

function show(form, shown) {
  const value = (name) => Number(form.elements[name].value);
  const job = {
    parameters: 1e6 * value("parameters"), computing: value("computing"), ranks: value("ranks"),
    bitsPerSecond: 1e6 * value("link"), packs: value("packs"), microBatches: value("microBatches"),
    allowed: value("allowed"),
  };
  const isWhole = Number.isInteger(job.ranks) && job.ranks >= 1;
  if (!isWhole || !(job.parameters > 0 && job.computing > 0 && job.bitsPerSecond > 0 && job.allowed >= 0)) {
    shown.textContent = "Every figure has to be above zero, and ranks a whole number.";
    return;
  }
  const { rows, choice } = calculate(job);
  const first = rows[choice];
  const head = document.createElement("p");
  const command = document.createElement("code");
  command.textContent = `--strategy ${first.strategy} --wire ${first.wire}`;
  head.append("First choice: ", command, `, ${three(rows[0].seconds / first.seconds)} times as fast as the default. `,
    `An exact exchange sends ${bytes(rows[0].sent)} per rank and keeps the link busy for ${three(rows[0].link)} s, `,
    `beside ${three(job.computing)} s of computing.`);
  if (first.core > first.link) {
    head.append(` A core limits exchanges on ${first.wire}, not the link: per update it packs and reads for `,
      `${three(first.core)} s, and the link sends for ${three(first.link)} s.`);
  }
  const table = document.createElement("table");
  const line = (cells, kind) => {
    const tr = document.createElement("tr");
    for (const cell of cells) {
      const one = document.createElement(kind);
      one.textContent = cell;
      tr.append(one);
    }
    return tr;
  };
  // What decides comes first: a phone shows five columns, and the others by a stroke.
  const titles = ["strategy", "wire", "s per update", "waits", "loss, nats", "sent per update", "memory"];
  const top = document.createElement("thead");
  top.append(line(titles, "th"));
  const body = document.createElement("tbody");
  rows.forEach((row, index) => {
    const nats = row.nats === null ? "unknown" : `+${row.nats.toFixed(3)}`;
    const tr = line([row.strategy, row.wire, three(row.seconds),
      `${Math.round(100 * row.waiting / row.seconds)} %`, nats, bytes(row.sent), bytes(row.memory)], "td");
    if (index === choice) tr.className = "chosen";
    body.append(tr);
  });
  table.append(top, body);
  shown.replaceChildren(head, table);
}

if (typeof document !== "undefined") {
  const form = document.getElementById("calculator");
  const shown = document.getElementById("calculated");
  for (const count of ESTIMATE.counts) {
    form.elements.microBatches.add(new Option(count, count, count === 4, count === 4));
  }
  form.addEventListener("input", () => show(form, shown));
  show(form, shown);
}
