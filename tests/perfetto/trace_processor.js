// Perfetto's trace processor, as its UI runs it in a web worker, as a filter: requests on stdin, replies on stdout.
//   node trace_processor.js FOLDER_OF_THE_UI < requests > replies
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const requests = fs.readFileSync(0);

// The parts of a web worker's environment that the module uses.
const worker = {
  console: { log() {}, warn: console.error, error: console.error },
  URL, TextDecoder, TextEncoder, performance, setTimeout, clearTimeout, crypto: globalThis.crypto,
  location: { href: "file:///" },
  importScripts() {},
  WorkerGlobalScope: function () {},
  XMLHttpRequest: class {
    open(method, name) {
      this.name = path.basename(name);
    }
    send() {
      const bytes = fs.readFileSync(path.join(folder, this.name));
      this.status = 200;
      this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    }
  },
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), worker);
const port = { postMessage: (bytes) => fs.writeSync(1, Buffer.from(bytes)) };
worker.onmessage({ data: port });

// The module starts in callbacks that are on the event loop by now, and accepts requests after its start.
setTimeout(() => {
  const copy = vm.runInContext("(bytes) => new Uint8Array(bytes)", worker);
  port.onmessage({ data: copy(requests) });
}, 0);
