/** The figures of one answer in the panel. */

import { showChart } from "./chart.js";
import { byId } from "../common/dom.js";
import { showLegend, showMembers, showProposers, showStatistics } from "./statistics.js";
import { showSteps } from "./steps.js";

const BETWEEN_MS = 150; // between drawings of an answer in progress, which take time from models

export class Figures {
  constructor() {
    this._byMember = false;
    this.show(null);
  }

  /** @param {import("../answers/answer.js").Answer | null} answer */
  show(answer) {
    this._answer = answer;
    this._shownMs = performance.now();
    showStatistics(byId("statistics"), answer);
    showLegend(byId("legend"), answer, this._byMember);
    byId("proposers").hidden = !showProposers(byId("proposers"), answer);
    byId("members-section").hidden = !showMembers(byId("members"), answer);
    showChart(byId("chart"), answer?.steps ?? []);
    showSteps(byId("steps"), answer?.steps ?? []);
  }

  /** Redraws the figures of an answer in progress, if it is time. */
  follow(answer) {
    if (performance.now() - this._shownMs > BETWEEN_MS) this.show(answer);
  }

  /** Colours tokens by member or by source. */
  colour(byMember) {
    this._byMember = byMember;
    this.show(this._answer);
  }
}
