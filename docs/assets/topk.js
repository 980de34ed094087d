// The figure of the home page: scores that can be dragged, and their sigmoid top-k for a k and a tau.
(() => {
  const root = document.getElementById("khot-figure");
  if (!root) return;
  root.replaceChildren(); // the picture, which is for those who see no figure

  const scores = [0.4, 1.6, -0.6, 2.2, 0.9, 1.2];
  const n = scores.length, LOW = -3, HIGH = 3;
  let k = 3, tau = 0.5;
  const WIDTH = 340, TOP = 18, MIDDLE = 128, ZERO = 262, FULL = 90; // MIDDLE: where a score of -3 lies

  const sigmoid = (z) => (z >= 0 ? 1 / (1 + Math.exp(-z)) : Math.exp(z) / (1 + Math.exp(z)));

  // The weights are sigmoid((x - t) / tau), and t is the threshold at which they sum to k.
  function topk() {
    if (k <= 0) return [scores.map(() => 0), Infinity];
    if (k >= n) return [scores.map(() => 1), -Infinity];
    const weights = (t) => scores.map((x) => sigmoid((x - t) / tau));
    // at these ends every weight is at most, or at least, k / n
    const shift = tau * Math.log(k / (n - k));
    let low = Math.min(...scores) - shift, high = Math.max(...scores) - shift;
    for (let i = 0; i < 200; i++) {
      const middle = (low + high) / 2;
      if (weights(middle).reduce((a, b) => a + b, 0) > k) low = middle;
      else high = middle;
    }
    return [weights((low + high) / 2), (low + high) / 2];
  }

  const NS = "http://www.w3.org/2000/svg";
  function add(parent, name, attributes, text) {
    const element = parent.appendChild(document.createElementNS(NS, name));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  const place = (i) => 36 + (i + 0.5) * ((WIDTH - 44) / n);
  const height = (x) => MIDDLE - ((x - LOW) / (HIGH - LOW)) * (MIDDLE - TOP);
  const show = (x) => (Math.abs(x) < 0.05 ? "0.0" : x.toFixed(1).replace("-", "\u2212"));

  const svg = add(root, "svg", { viewBox: `0 0 ${WIDTH} 284`, role: "group", "aria-label": "Soft top-k of six scores" });
  add(svg, "text", { x: 0, y: 10 }, "scores: drag them");
  add(svg, "text", { x: 0, y: ZERO - FULL - 18 }, "weights");
  for (const [y, label] of [[height(HIGH), "3"], [height(0), "0"], [height(LOW), "\u22123"], [ZERO - FULL, "1"], [ZERO, "0"]]) {
    add(svg, "text", { x: 26, y: y + 4, "text-anchor": "end" }, label);
    add(svg, "line", { x1: 32, x2: WIDTH, y1: y, y2: y, stroke: "var(--md-default-fg-color--lightest)" });
  }
  const threshold = add(svg, "line", { x1: 32, x2: WIDTH, stroke: "var(--md-accent-fg-color)", "stroke-dasharray": "4 3" });
  const name = add(svg, "text", { x: WIDTH, "text-anchor": "end" }, "threshold");
  const columns = scores.map((_, i) => {
    const bar = add(svg, "rect", { x: place(i) - 15, width: 30, fill: "var(--md-primary-fg-color--light)" });
    const weight = add(svg, "text", { x: place(i), "text-anchor": "middle" });
    const handle = add(svg, "g", {
      role: "slider", tabindex: 0, "aria-label": `score ${i + 1}`, "aria-orientation": "vertical",
      "aria-valuemin": LOW, "aria-valuemax": HIGH,
    });
    add(handle, "circle", { r: 18, fill: "transparent" }); // large enough for a finger
    add(handle, "circle", { r: 7, fill: "var(--md-typeset-a-color)" });
    const score = add(handle, "text", { y: -11, "text-anchor": "middle" });
    const set = (x) => {
      scores[i] = Math.round(10 * Math.min(HIGH, Math.max(LOW, x))) / 10;
      draw();
    };
    const steps = { ArrowUp: 0.1, ArrowRight: 0.1, ArrowDown: -0.1, ArrowLeft: -0.1, PageUp: 1, PageDown: -1, Home: LOW - HIGH, End: HIGH - LOW };
    handle.addEventListener("keydown", (event) => {
      if (!(event.key in steps)) return;
      event.preventDefault();
      event.stopPropagation();
      set(scores[i] + steps[event.key]);
    });
    handle.addEventListener("pointerdown", (event) => handle.setPointerCapture(event.pointerId));
    handle.addEventListener("pointermove", (event) => {
      if (!handle.hasPointerCapture(event.pointerId)) return;
      const box = svg.getBoundingClientRect();
      const y = ((event.clientY - box.top) / box.width) * WIDTH;
      set(LOW + ((MIDDLE - y) / (MIDDLE - TOP)) * (HIGH - LOW));
    });
    return { bar, weight, handle, score };
  });

  function slider(label, minimum, maximum, step, value, change) {
    const box = root.appendChild(document.createElement("label"));
    const text = box.appendChild(document.createElement("span"));
    const input = box.appendChild(document.createElement("input"));
    Object.assign(input, { type: "range", min: minimum, max: maximum, step, value });
    const update = () => {
      const said = change(Number(input.value));
      text.textContent = `${label} = ${said}`;
      input.setAttribute("aria-label", label);
      input.setAttribute("aria-valuetext", said);
    };
    input.addEventListener("input", () => { update(); draw(); });
    update();
  }
  slider("k", 0, n, 0.25, k, (v) => { k = v; return String(v); });
  // tau is even in its logarithm, from 0.01 to 10
  slider("tau", -2, 1, 0.05, Math.log10(tau), (v) => { tau = Number((10 ** v).toPrecision(2)); return String(tau); });

  function draw() {
    const [weights, t] = topk();
    columns.forEach(({ bar, weight, handle, score }, i) => {
      handle.setAttribute("transform", `translate(${place(i)} ${height(scores[i])})`);
      handle.setAttribute("aria-valuenow", scores[i]);
      handle.setAttribute("aria-valuetext", `${scores[i]}, weight ${weights[i].toFixed(2)}`);
      score.textContent = show(scores[i]);
      bar.setAttribute("y", ZERO - FULL * weights[i]);
      bar.setAttribute("height", FULL * weights[i]);
      weight.setAttribute("y", ZERO + 16);
      weight.textContent = weights[i].toFixed(2);
    });
    const y = height(Math.min(HIGH, Math.max(LOW, t)));
    const outside = t < LOW || t > HIGH;
    for (const element of [threshold, name]) element.style.display = outside ? "none" : "";
    threshold.setAttribute("y1", y);
    threshold.setAttribute("y2", y);
    name.setAttribute("y", 10);
    name.textContent = `- - threshold at ${show(t)}`;
    Object.assign(root.dataset, { scores: JSON.stringify(scores), weights: JSON.stringify(weights), k, tau });
  }
  draw();
})();
