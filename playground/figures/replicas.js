/** The server's replicas as they are now: load, acceptance, and why drafts rest. Asks only while it is seen. */

import { facts, make } from "../dom.js";
import { number, orDash, percent } from "../format.js";
import { ApiError } from "../request/api.js";
import { reasonOf } from "./speculation.js";

const BETWEEN_MS = 2000;

export class Replicas {
  constructor(details, element, api) {
    Object.assign(this, { _details: details, _element: element, _api: api, _timer: 0, _last: null });
    details.addEventListener("toggle", () => this._load());
    document.addEventListener("visibilitychange", () => this._load());
  }

  async _load() {
    clearTimeout(this._timer);
    if (!this._details.open || document.hidden) return;
    try {
      const status = await this._api.get("v1/status");
      this._element.replaceChildren(...contentOf(status, this._last));
      this._last = status;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this._element.replaceChildren(facts(error.message, "p"));
    }
    clearTimeout(this._timer); // of a load that began meanwhile
    this._timer = setTimeout(() => this._load(), BETWEEN_MS);
  }
}

function contentOf({ requests, endpoints, models, replicas, uptime_s: nowS }, last) {
  const waitS = Math.max(0, ...endpoints.map((endpoint) => endpoint.predicted_wait_s));
  const wait = waitS >= 1 ? `, the next one for ${number(waitS)} s` : "";
  const { running, waiting, max } = requests;
  const words = `${number(running)} running, ${number(waiting)} waiting${wait}, at most ${number(max)}`;
  const before = last && last.uptime_s < nowS ? last : null;
  return [
    facts(`Requests: ${words}.`, "p"),
    ...models.filter((count) => count.running < count.wanted).map(shortageLine),
    ...models.filter((count) => count.last_restart).map(restartLine),
    ...endpoints.map((endpoint) => endpointLine(endpoint, before, nowS)),
    make("ul", { className: "replicas" }, ...replicas.map(replicaItem)),
  ];
}

/** How many replicas of a model are up, and why not more. */
function shortageLine({ model, running, wanted, reason }) {
  return line(model, `: ${number(running)} of ${number(wanted)} replicas, ${reason}`);
}

/** When and why a replica of a model was last replaced. */
function restartLine({ model, last_restart: { at_s: atS, reason } }) {
  return line(model, `: a replica was replaced at ${new Date(atS * 1000).toLocaleString()}: ${reason}`);
}

/** An endpoint's speed since the last look, and its acceptance; since the server's start if nothing happened. */
function endpointLine({ name, totals, proposers }, before, nowS) {
  const old = before?.endpoints.find((endpoint) => endpoint.name === name)?.totals;
  const grown = (key) => totals[key] - (old?.[key] ?? 0);
  const recent = old && grown("drafted") > 0;
  const [accepted, drafted] = recent ? [grown("accepted"), grown("drafted")] : [totals.accepted, totals.drafted];
  const speed = grown("tokens") / (nowS - (before?.uptime_s ?? 0));
  const words = `${orDash(speed, 1)} tokens/s, ${percent(accepted / drafted)} accepted${recent ? "" : " since the start"}`;
  return line(name, `: ${[words, ...proposers.map(proposerWords)].join("; ")}`);
}

function proposerWords({ name, acceptance_rate: rate, time_share: share }) {
  return `${name} ${percent(rate ?? NaN)} accepted, ${percent(share ?? NaN)} of the time`;
}

function line(name, words) {
  return make("p", { className: "facts" }, make("b", { textContent: name }), words);
}

function replicaItem(replica) {
  const { name, role, running, waiting, slots, kv_usage: kv, drafting, weights } = replica;
  const load = `${number(running)} of ${number(slots)}${waiting ? `, ${number(waiting)} wait` : ""}`;
  const loaded = weights ? ` · weights ${weights.version}${weights.asleep ? ", asleep" : ""}` : "";
  const state = drafting === null ? "" : reasonOf(replica) || "Wants drafts.";
  return make(
    "li",
    {},
    make("span", {}, make("b", { textContent: name }), facts(` ${role}`)),
    facts(`${load} · KV ${percent(kv)}${loaded}`),
    make("meter", { min: 0, max: Math.max(slots, 1), value: running, "aria-label": `Load of ${name}` }),
    make("span", { className: "facts state", textContent: state }),
  );
}
