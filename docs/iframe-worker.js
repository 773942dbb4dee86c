// Pages that are opened from the disk may start no worker, and the search is one: there its script runs in a frame.
// Loaded in the place of a script that the plugin `offline` would take from another site (mkdocs.yml).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", {data})));
      inner.importScripts = async (...addresses) => {
        for (const each of addresses) await this.load(each);
      };
      this.ready = this.load(new URL(address, location.href).href);
    }
    load(address) {
      const script = this.inner.document.createElement("script");
      script.src = new URL(address, location.href).href;
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
        this.inner.document.documentElement.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {}
  };
}
