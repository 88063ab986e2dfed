// Replaces <main> every few seconds while the page is visible and nobody works in it.
"use strict";
(() => {
  const main = document.querySelector("main[data-live]");
  const button = document.getElementById("live");
  const late = document.getElementById("late");
  if (!main || !button) return;
  const every = Number(main.dataset.live) * 1000;
  let live = true, failed = 0, timer = 0, asking = false;

  const inUse = () =>
    main.contains(document.activeElement) && document.activeElement !== main ||
    !document.getSelection().isCollapsed;

  const later = () => {
    clearTimeout(timer);
    if (live && !document.hidden) timer = setTimeout(ask, every * Math.min(1 + failed, 12));
  };

  async function ask() {
    if (asking || !live || document.hidden) return;
    if (inUse()) return later();
    asking = true;
    try {
      const answer = await fetch(location.href, { headers: { "X-Taskguard-Live": "1" }, cache: "no-store", signal: AbortSignal.timeout(15000) });
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("main[data-live]");
      if (!fresh) throw new Error("not the page");
      if (!inUse() && live) {
        const x = [...main.querySelectorAll(".wide")].map((each) => each.scrollLeft);
        main.replaceChildren(...fresh.childNodes);
        main.querySelectorAll(".wide").forEach((each, at) => { each.scrollLeft = x[at] || 0; });
      }
      failed = 0;
    } catch {
      failed += 1;
    }
    asking = false;
    late.hidden = failed < 2;
    later();
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    live = !live;
    button.textContent = live ? "Pause updates" : "Resume updates";
    live ? ask() : clearTimeout(timer);
  });
  document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : ask());
  later();
})();
