"use strict";
// Uses a page as a reader would, with mouse and keyboard, and leaves what came of it in #found as JSON.

addEventListener("load", async () => {
  const loaded = document.getElementById("frame").contentDocument.documentElement;
  while (!("drawn" in loaded.dataset)) await new Promise((resolve) => setTimeout(resolve, 10));
  const frame = document.getElementById("frame"), page = frame.contentDocument, view = frame.contentWindow;
  const element = (id) => page.getElementById(id);
  const range = (id) => element(id)._fullLayout.xaxis.range;
  const choose = (id, field, value) => { element(id)[field] = value; element(id).dispatchEvent(new view.Event("change")); };
  const mouse = (target, kind, clientX, clientY) =>
    target.dispatchEvent(new view.MouseEvent(kind, { bubbles: true, cancelable: true, view, clientX, clientY, buttons: 1 }));
  const found = {};

  const plot = element("loss").querySelector(".nsewdrag"), box = plot.getBoundingClientRect();
  const { xaxis, yaxis } = element("loss")._fullLayout, curve = element("loss").data[0];
  mouse(plot, "mousemove", box.left + xaxis.d2p(curve.x[4]), box.top + yaxis.d2p(curve.y[4]));
  found.hover = [...element("loss").querySelectorAll(".hoverlayer .hovertext")].map((one) => one.textContent);

  choose("axis", "value", "seconds");
  found.seconds = element("loss").data[0].x;
  choose("logarithmic", "checked", true);
  found.scale = element("loss")._fullLayout.yaxis.type;
  choose("logarithmic", "checked", false);
  choose("axis", "value", "updates");

  found.whole = range("loss");
  mouse(plot, "mousedown", box.left + box.width / 4, box.top + box.height / 2);
  for (const [kind, share] of [["mousemove", 0.5], ["mousemove", 0.75], ["mouseup", 0.75]]) {
    mouse(page.querySelector(".dragcover"), kind, box.left + box.width * share, box.top + box.height / 2);
  }
  found.dragged = range("loss");
  document.getElementById("found").textContent = JSON.stringify(found);
});
