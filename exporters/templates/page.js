"use strict";
(() => {
  const period_ms = 3000;
  const status = document.getElementById("connection");
  let failures = 0;

  const keepOpen = (fresh) => {
    for (const box of fresh.querySelectorAll("details[id]")) {
      const old = document.getElementById(box.id);
      if (old) box.open = old.open;
    }
  };

  const swap = (page) => {
    const live = [...page.querySelectorAll("[data-live]")];
    const same = live.length === document.querySelectorAll("[data-live]").length &&
      live.every((part) => document.getElementById(part.id));
    const focused = document.activeElement && document.activeElement.closest("details[id]");
    if (!same) {
      keepOpen(page);
      document.getElementById("main").replaceWith(document.adoptNode(page.getElementById("main")));
    }
    for (const part of [...page.querySelectorAll("[data-live]")]) {
      const old = document.getElementById(part.id);
      keepOpen(part);
      if (old && old.outerHTML !== part.outerHTML) old.replaceWith(document.adoptNode(part));
    }
    if (focused) {
      const again = document.getElementById(focused.id);
      if (again && again !== focused) again.querySelector("summary").focus({ preventScroll: true });
    }
  };

  const refresh = async () => {
    if (document.hidden) return;
    let why = "The sidecar does not answer";
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (answer.status === 404) why = "This configuration is gone";
      if (!answer.ok) throw new Error(answer.status);
      swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
      if (failures) status.textContent = "Connected again.";
      failures = 0;
    } catch {
      failures += 1;
      if (failures === 2) status.textContent = `${why}; the page shows its last state.`;
    }
    document.documentElement.classList.toggle("stale", failures > 1);
  };

  // The answer to a question of the what-if form comes without a turn of the page.
  document.addEventListener("submit", async (event) => {
    const form = event.target.closest("#what-if form");
    if (!form) return;
    event.preventDefault();
    const asked = new URLSearchParams(new FormData(form));
    asked.set(event.submitter.name, event.submitter.value);
    const url = `/?${asked}`;
    try {
      const page = new DOMParser().parseFromString(await (await fetch(url)).text(), "text/html");
      document.getElementById("answer").replaceWith(document.adoptNode(page.getElementById("answer")));
      history.replaceState(null, "", `${url}#what-if`);
    } catch {
      location.assign(`${url}#what-if`);
    }
  });

  setInterval(refresh, period_ms);
  document.addEventListener("visibilitychange", refresh);
})();
