/** The figures of one answer, all over the panel. */

import { showChart } from "./chart.js";
import { byId } from "./dom.js";
import { showLegend, showMembers, showStatistics } from "./statistics.js";
import { showSteps } from "./steps.js";

const BETWEEN_MS = 150; // drawings: an answer in progress asks for more, and each takes time that a model could use

export class Figures {
  constructor() {
    this._byMember = false;
    this.show(null);
  }

  /** @param {import("./answer.js").Answer | null} answer */
  show(answer) {
    this._answer = answer;
    this._shownMs = performance.now();
    showStatistics(byId("statistics"), answer);
    showLegend(byId("legend"), answer, this._byMember);
    byId("members-section").hidden = !showMembers(byId("members"), answer);
    showChart(byId("chart"), answer?.steps ?? []);
    showSteps(byId("steps"), answer?.steps ?? []);
  }

  /** Of an answer in progress. */
  follow(answer) {
    if (performance.now() - this._shownMs > BETWEEN_MS) this.show(answer);
  }

  /** byMember: what the tokens' colours tell, whose doing they are or how they came to be. */
  colour(byMember) {
    this._byMember = byMember;
    this.show(this._answer);
  }
}
