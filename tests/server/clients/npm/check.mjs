// Uses a server through the official client of the npm registry: node check.mjs BASE_URL
// Prints one JSON object, which the test looks at.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const model = models[0];
const messages = [{ role: "user", content: "Hello" }];
const asked = { model, messages, max_tokens: 20, seed: 1, temperature: 1 };

const whole = await client.chat.completions.create(asked);
let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...asked, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const helper = await client.chat.completions.stream({ ...asked, logprobs: true }).finalChatCompletion();
const plain = await client.completions.create({ model, prompt: ["a", "b"], max_tokens: 3, seed: 2 });

const together = await Promise.all(
  [0, 1, 2, 3, 4, 5, 6, 7].map((seed) => client.chat.completions.create({ ...asked, seed })),
);

const endless = await client.completions.create({
  model, prompt: "a", max_tokens: 1500, stream: true,
});
for await (const _ of endless) break; // leaves, which closes the connection

let error = null;
try {
  await client.chat.completions.create({ ...asked, temperature: 9000 });
} catch (caught) {
  error = { name: caught.constructor.name, status: caught.status, param: caught.param };
}

console.log(JSON.stringify({
  models, whole: whole.choices[0].message.content, streamed, usage,
  reason: whole.choices[0].finish_reason,
  helper: helper.choices[0].message.content,
  logprobs: helper.choices[0].logprobs.content.length,
  plain: plain.choices.map((choice) => choice.index),
  together: together.length, error, requestId: whole._request_id,
}));
